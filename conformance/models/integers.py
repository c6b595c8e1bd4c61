"""Data for tiny modules whose gradients are integers, so that every mean over up to 4 ranks is exact.

A program builds a module of a few layers, gives it small integer weights and inputs, and multiplies the loss by
multiples of 144. All gradients are then multiples of 144 far below 2**28: sums are exact in float32 in any order, and
so is a division by 2, 3 or 4 before or after the sum, twice where gradients are kept. (The truth checks each mean that
it computes: `models.exact.exact_mean`.)
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from conformance.models.batches import mixed_seed

#: What losses are multiplied by: divisible twice by 1, 2, 3 and 4.
UNIT = 144

_Module = TypeVar("_Module", bound=nn.Module)
_Phase = Callable[[str], contextlib.AbstractContextManager[None]]


def integers(*shape: int, key: tuple[object, ...], largest: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of `shape` of integers from -`largest` to `largest` without 0, the same wherever it is called.

    Different keys give different values, and none is 0: a value that is lost or in a wrong place shows.
    """
    generator = torch.Generator().manual_seed(mixed_seed("integers", *key))
    size = torch.randint(1, largest + 1, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (size * sign).to(dtype)


def with_integer_weights(module: _Module, *key: object) -> _Module:
    """Fill all floating or complex parameters of `module` with -2, -1, 1, 2, the same for the same `key`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(integers(*parameter.shape, key=("weight", name, *key), largest=2, dtype=parameter.dtype))
    return module


@dataclass(frozen=True)
class RankStep:
    """One rank's part in one step: its data, and forward and backward as phases of these names, where there are any."""

    rank: int
    step: int
    device: torch.device | str = "cpu"
    phase: _Phase = lambda _: contextlib.nullcontext()

    def inputs(self, *shape: int, micro: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return integer inputs of `shape`, different for every rank, step and micro-batch."""
        key = ("input", self.rank, self.step, micro)
        return integers(*shape, key=key, dtype=dtype).to(self.device)

    def loss(self, output: Tensor, micro: int = 0) -> Tensor:
        """Return a scalar that is linear in `output`, with different coefficients for every rank and element."""
        key = ("loss", self.rank, self.step, micro)
        coefficients = UNIT * integers(*output.shape, key=key, dtype=output.real.dtype)
        return (output * coefficients.to(output.device)).real.sum()

    def forward(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with self.phase("forward"):
            return model(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward from `loss` as phase `backward`."""
        with self.phase("backward"):
            loss.backward(**kwargs)
