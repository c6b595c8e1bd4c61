"""Tolerances that are derived: how far results move when inputs, parameters and gradients move by one ulp."""

import math
from typing import Any

import torch
from torch import Tensor

from conformance.parity.tensors import Key

#: A tolerance is so many times the largest spread of so many repetitions. Correct trainings use at most 0.53 of it.
FACTOR, NUDGES = 8.0, 5


class Nudge:
    """Moves floating-point tensors by one ulp at random, and gradients by an ulp of their largest element."""

    def __init__(self, ulp: float, seed: int) -> None:
        self._ulp, self._random = ulp, torch.Generator().manual_seed(seed)

    def __call__(self, value: Any) -> Any:
        """Return the tensor moved; anything else as it is."""
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        signs = torch.randint(0, 2, value.shape, generator=self._random) * 2 - 1
        return value.detach() * (1 + self._ulp * signs.to(value.device))

    def gradient(self, gradient: Tensor) -> None:
        """Move a gradient in place. Adam turns one that is only rounding into a whole step, up or down."""
        if gradient.is_sparse:
            gradient = gradient._values()
        if gradient.numel():
            noise = torch.rand(gradient.shape, generator=self._random, dtype=gradient.dtype) * 2 - 1
            gradient += noise.to(gradient.device) * self._ulp * gradient.abs().max() * (gradient != 0)


def tolerance(key: Key, want: Tensor, spread: Tensor | None, raw: Tensor, ulp: float) -> Tensor:
    """Return the tolerance of each element.

    `spread`: how far repetitions are from `want` at most, elementwise; `raw`: the value itself where `want` is how far
    a parameter has moved; `ulp`: of the working dtype. Only parameters have tolerances that differ by element.
    """
    eps = torch.finfo(raw.dtype).eps if raw.is_floating_point() else 0.0
    if eps and key.kind in ("gradient", "buffer", "optimizer state", "number"):
        eps = max(eps, ulp)
    floor = torch.full_like(want, eps * largest(raw))
    if spread is None or spread.shape != want.shape:
        spread = torch.zeros_like(want)
    moved = torch.maximum(spread, floor).nan_to_num(nan=math.inf, posinf=math.inf)
    return FACTOR * (moved if key.kind == "parameter" else torch.full_like(want, largest(moved)))


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value, 0 of an empty tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
