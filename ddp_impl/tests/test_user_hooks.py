"""Hooks of the user on accumulated gradients: what they leave of a gradient is averaged, whenever they came."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one, run_ranks
from ddp_impl.torch_internals.tensors import post_accumulate_hooks

#: Layers of a few values and of many: those are reduced, or move into their bucket, where they are.
SIZES = (4, 4, 600, 600, 2)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "views in small buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
MOMENTS = ("before wrapping", "after wrapping", "before the second step", "before the second backward")


def _model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(before, after) for before, after in itertools.pairwise(SIZES)))
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model


def _batch(rank: int, step: int) -> Tensor:
    return torch.randint(-2, 3, (3, SIZES[0]), generator=torch.Generator().manual_seed(10 * rank + step)).float()


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _registers_at(moment: str, options: Mapping[str, Any]) -> list[str]:
    """Return the names of gradients that are wrong in three steps, on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = _model()
    parameters = dict(module.named_parameters())

    def register(now: str) -> None:
        if now == moment:
            for parameter in parameters.values():
                parameter.register_post_accumulate_grad_hook(_halve)

    register("before wrapping")
    ddp: Any = DistributedDataParallel(module, **options)
    register("after wrapping")
    wrong = []
    for step in range(3):
        if step == 1:
            register("before the second step")
        module.zero_grad()
        loss = ddp(_batch(rank, step)).sum()
        if step == 1:
            register("before the second backward")
        loss.backward()
        factor = 0.5 if step or moment in ("before wrapping", "after wrapping") else 1.0
        alone = _model()
        for other in range(world_size):
            alone(_batch(other, step)).sum().backward()
        for name, parameter in alone.named_parameters():
            assert parameter.grad is not None
            seen = parameters[name].grad
            if seen is None or not torch.equal(seen, parameter.grad * factor / world_size):
                wrong.append(f"{name} in step {step}")
    return wrong


def _wrong_anywhere(rank: int) -> dict[str, list[str]]:
    found = {f"{moment}, {name}": _registers_at(moment, OPTIONS[name]) for moment in MOMENTS for name in OPTIONS}
    return {what: wrong for what, wrong in found.items() if wrong}


def test_what_the_users_hooks_leave_of_a_gradient_is_averaged(tmp_path: Path) -> None:
    assert run_ranks(_wrong_anywhere, 2, tmp_path / "ranks") == [{}, {}]


def _step(*models: Any) -> None:
    torch.stack([model(torch.ones(1, 2)).sum() for model in models]).sum().backward()


def _nothing(_: Tensor) -> None:
    """Stand for a hook of the user."""


def _keys(parameter: Tensor) -> list[int]:
    return list(post_accumulate_hooks(parameter))


def test_hooks_of_the_user_keep_their_order_and_may_be_removed() -> None:
    with group_of_one():
        module = nn.Linear(2, 1)
        ddp: Any = DistributedDataParallel(module)
        (own,) = _keys(module.weight)
        handles = [module.weight.register_post_accumulate_grad_hook(_nothing) for _ in range(3)]
        _step(ddp)
        assert _keys(module.weight) == [*(handle.id for handle in handles), own]
        handles[1].remove()
        _step(ddp)
        assert _keys(module.weight) == [handles[0].id, handles[2].id, own]
        ddp.reducer.remove_hooks()
        assert _keys(module.weight) == [handles[0].id, handles[2].id]
        assert not ddp.reducer.hooks.come_last()


@pytest.mark.parametrize("register", [None, _nothing])
def test_reducers_that_share_a_parameter_do_not_overtake_each_other(register: Callable[[Tensor], None] | None) -> None:
    with group_of_one():
        module: Any = nn.Linear(2, 1)
        both: list[Any] = [DistributedDataParallel(module) for _ in range(2)]
        _step(*both)
        first, second = _keys(module.weight)
        if register is not None:
            handle = module.weight.register_post_accumulate_grad_hook(register)
            _step(*both)
            assert _keys(module.weight) == [handle.id, first, second]
            handle.remove()
        _step(*both)
        assert _keys(module.weight) == [first, second]
