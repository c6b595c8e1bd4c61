"""What a wrapped module may become, and which parameters an error or a warning must name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.func import functional_call

from ddp_impl.module.parameter_watch import ParameterWatch, managed_parameters
from ddp_impl.torch_internals.tensors import set_ignored_names


class Wrapper(nn.Module, Joinable):
    """Stands for a DDP inside the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    join_hook: Any = None
    join_device: Any = None
    join_process_group: Any = None


def pool() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))


def watched(module: nn.Module, ignored: frozenset[str] = frozenset()) -> ParameterWatch:
    return ParameterWatch(module, managed_parameters(module, ignored), ignored, 3)


CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "unfrozen": (lambda module: module[1].requires_grad_(True), r"require a gradient: 1\.weight, 1\.bias\."),
    "one of two unfrozen": (lambda module: module[1].bias.requires_grad_(True), r"require a gradient: 1\.bias\."),
    "appended": (lambda module: module.append(nn.Linear(2, 2)), r"require a gradient: 2\.weight, 2\.bias\."),
    "replaced": (
        lambda module: module.register_module("0", nn.Linear(2, 2)), r"removed after wrapping: 0\.weight, 0\.bias\."
    ),
    "removed": (lambda module: module.pop(0), r"removed after wrapping: 0\.weight, 0\.bias\."),
}  # fmt: skip


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_forward_names_what_is_not_averaged(change: str) -> None:
    module = pool()
    watch = watched(module)
    watch.check()
    make, message = CHANGES[change]
    make(module)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            watch.check()


def test_what_was_frozen_again_is_no_error() -> None:
    module = pool()
    watch = watched(module)
    module[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match="were unfrozen"):
        watch.check()
    module[1].requires_grad_(False)
    watch.check()


def test_ignored_parameters_are_left_alone_also_when_they_come_later() -> None:
    module = pool()
    watch = watched(module, frozenset({"1.weight"}))
    module[1].weight.requires_grad_(True)
    watch.check()
    module.append(nn.Linear(2, 2, bias=False))
    set_ignored_names(module, {"1.weight", "2.weight"})
    watch.check()


def test_a_module_with_a_ddp_of_its_own_is_left_to_that_one() -> None:
    module = pool()
    watch = watched(module)
    module.append(Wrapper(nn.Linear(2, 2)))
    watch.check()
    module.append(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"^\[rank 3\] .*require a gradient: 3\.weight, 3\.bias\."):
        watch.check()


@pytest.mark.parametrize("keeps", [False, True])
def test_stand_ins_that_keep_their_gradients_are_named_once(keeps: bool) -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = pool()
            self.watch = watched(self.module)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.watch.check()
            output: torch.Tensor = self.module(inputs)
            return output

    model = Checked()
    tensors = {name: 2 * each for name, each in model.named_parameters()}
    if keeps:
        tensors = {name: each.detach().requires_grad_() for name, each in tensors.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            functional_call(model, tensors, (torch.ones(1, 2),))
            model(torch.ones(1, 2))
    texts = [str(each.message) for each in caught]
    assert len(texts) == keeps
    assert all("0.weight, 0.bias" in text and "local" in text for text in texts)


def test_a_module_that_torchscript_compiled_is_as_it_was() -> None:
    compiled: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    watch = watched(nn.Sequential(compiled, nn.Linear(2, 2)))
    watch.check()


@pytest.mark.parametrize(("stand_in", "is_taken"), [(lambda weight: weight * 1, True), (torch.zeros_like, False)])
def test_a_tensor_that_is_computed_from_a_parameter_may_take_its_place(
    stand_in: Callable[[torch.Tensor], torch.Tensor], is_taken: bool
) -> None:
    module = pool()
    watch = watched(module)
    weight: Any = module[0].weight
    del module[0].weight
    module[0].weight = stand_in(weight)
    if is_taken:
        assert not watch.check()
    else:
        with pytest.raises(RuntimeError, match=r"removed after wrapping: 0\.weight\."):
            watch.check()
