"""Integers small enough for every dtype: `models.integers` for modules in half precision.

Weights are 1 and -1, inputs at most 2, and losses are multiplied by 12 once. In modules of a few narrow layers all
gradients are then multiples of 12 whose sums over 4 ranks have at most 8 significant bits.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, integers

#: What losses are multiplied by: divisible by 2, 3 and 4.
UNIT = 12

_Module = TypeVar("_Module", bound=nn.Module)


def with_small_weights(module: _Module, *key: object, beside: float = 0.0) -> _Module:
    """Fill all parameters of `module` with 1 and -1, plus `beside`; the same for the same `key`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            whole = integers(*parameter.shape, key=("small weight", name, *key), largest=1)
            parameter.copy_((whole + beside).to(parameter.dtype))
    return module


def small_inputs(turn: RankStep, *shape: int, micro: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return inputs of 1, 2, -1 and -2, different for every rank, step and micro-batch."""
    key = ("small input", turn.rank, turn.step, micro)
    return integers(*shape, key=key, largest=2, dtype=dtype).to(turn.device)


def small_loss(turn: RankStep, output: Tensor, micro: int = 0) -> Tensor:
    """Return a real scalar that is linear in `output`, with coefficients of 12 and -12."""
    key = ("small loss", turn.rank, turn.step, micro)
    coefficients = UNIT * integers(*output.shape, key=key, largest=1, dtype=output.real.dtype)
    return (output * coefficients.to(output.device)).real.sum()
