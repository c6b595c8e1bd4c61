"""Tensors as `PlainDDP` takes them from a rank and gives them to it: copied, laid out anew, found in an output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def a_one(like: Tensor) -> Tensor:
    """Return a one of the dtype and on the device of `like`, which asks for a gradient."""
    return torch.ones((), dtype=like.dtype, device=like.device, requires_grad=True)


def a_copy(tensor: Tensor) -> Tensor:
    """Return a copy that no graph knows."""
    return tensor.detach().clone()


def laid_out(mean: Tensor, parameter: Tensor) -> Tensor:
    """Return the mean as a rank's own gradient, in the layout of the one that it had, or else of the parameter."""
    if mean.is_sparse:
        return mean.clone()
    like = parameter if parameter.grad is None or parameter.grad.is_sparse else parameter.grad
    return torch.empty_like(like, requires_grad=False).copy_(mean.detach())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in an output: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(tensors_in, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(tensors_in, value))
    elif hasattr(value, "__dataclass_fields__"):
        yield from itertools.chain.from_iterable(
            tensors_in(getattr(value, name)) for name in value.__dataclass_fields__
        )
