"""Kinds of tensors in autograd, and modes of torch, which must not affect an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Kind:
    """A function that makes a tensor of this kind, in the same memory, and the mode in which it is made and passed.

    `of_outputs`: outputs may be of it. Autograd forbids writes by torch's functions, as gloo's, to a watched leaf.
    """

    make: Callable[[Tensor], Tensor]
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    of_outputs: bool = True


@contextmanager
def _float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _watched(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "": Kind(_as_it_is),
        "Parameters": Kind(nn.Parameter, torch.no_grad),
        "Parameters, with gradients enabled": Kind(nn.Parameter, torch.enable_grad, of_outputs=False),
        "tensors that require grad": Kind(_watched, torch.no_grad),
        "tensors that require grad, with gradients enabled": Kind(_watched, torch.enable_grad, of_outputs=False),
        "inference tensors": Kind(_as_it_is, torch.inference_mode),  # what is made in that mode is one
        "float64 as the default dtype": Kind(_as_it_is, _float64_by_default),
        "autocast of the CPU": Kind(_as_it_is, lambda: torch.autocast("cpu", torch.bfloat16)),
        "anomaly mode": Kind(_as_it_is, lambda: torch.autograd.detect_anomaly(check_nan=False)),
    }
)
