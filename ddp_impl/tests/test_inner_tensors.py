"""Tensors of classes of their own: copied by the memory that is behind them, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from ddp_impl import DistributedDataParallel
from ddp_impl.base.nested_tensors import memory
from ddp_impl.tests.ranks import group_of_one, run_ranks


class Mute(Tensor):
    """Refuses every operator, as classes of quantised weights do."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, owns: bool) -> Any:
        if owns:
            return Tensor._make_subclass(cls, held)
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a quantised weight")


class Telling(Mute):
    """Says what it is made of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None


def of_each_kind(value: float) -> dict[str, Tensor]:
    plain = [torch.full((2,), value + place) for place in range(6)]
    return {
        "two": TwoTensor(plain[0], plain[1]),
        "nested": TwoTensor(TwoTensor(plain[2], plain[3]), TwoTensor(plain[4], plain[5])),
        "owner": Mute(torch.full((2,), value + 6), owns=True),
        "telling": Telling(torch.full((2,), value + 7), owns=False),
        "sub": torch.full((2,), value + 8).as_subclass(type("Sub", (Tensor,), {})),
    }


def wrapped_and_run(rank: int) -> list[list[float]]:
    states = []
    for _ in range(5):
        module = nn.Linear(2, 2)
        for name, tensor in of_each_kind(10.0 * rank).items():
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            module.register_buffer(f"{name}_buffer", of_each_kind(10.0 * rank + 100)[name])
        ddp = DistributedDataParallel(module)
        for _ in range(2):
            named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            states.append([value for part in memory("tensor", named) for value in part.flatten().tolist()])
            for part in memory("buffer", dict(module.named_buffers())) if rank else ():
                part.fill_(7)
            ddp(torch.ones(1, 2)).sum().backward()
    return states


def test_every_part_of_them_is_rank_0s(tmp_path: Path) -> None:
    first, second = run_ranks(wrapped_and_run, 2, tmp_path)
    assert first == second
    assert first[0][-18:] == [100.0 + place for place in (0, 1, 2, 3, 4, 5, 6, 7, 8) for _ in range(2)]


@pytest.mark.parametrize("kind", ["frozen", "buffer", "trained", "two", "meta", "meta too"])
def test_what_cannot_be_given_rank_0s_values_is_refused_by_name(kind: str) -> None:
    module = nn.Linear(2, 2)
    held = Mute(torch.ones(2), owns=False)
    if kind == "buffer":
        module.register_buffer("codes", held)
    elif kind == "meta":
        module = module.to("meta")
    elif kind == "meta too":
        module.register_parameter("codes", nn.Parameter(torch.ones(2, device="meta")))
    else:
        tensor = TwoTensor(torch.ones(2), torch.ones(2)) if kind == "two" else held
        module.register_parameter("codes", nn.Parameter(tensor, requires_grad=kind != "frozen"))
    words = {"meta": "'weight' is on the meta device.*to_empty", "meta too": "on cpu.*'weight'.*meta.*'codes'"}.get(
        kind, "'codes' is a .*_ddp_params_and_buffers_to"
    )
    with group_of_one(), pytest.raises((RuntimeError, ValueError), match=words):
        DistributedDataParallel(module)
