"""Marks on what forward returns, by which a reducer knows which backward is its own, and keeps none of it alive.

Whoever holds a node of autograd's holds its graph. A node of a function in Python is an object in Python, which can be
held weakly; to torch's own ones there is no such way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_impl.nested_tensors import map_tensors
from ddp_impl.torch_internals.tensors import is_bound_to_transform, outside_transforms


def marked(output: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Return `output`, which holds `tensors`, and these, with a mark on each that a backward may come to."""
    marks: dict[int, Tensor] = {}

    def mark(tensor: Tensor) -> Tensor:
        if id(tensor) not in marks:
            marks[id(tensor)] = _marked(tensor)
        return marks[id(tensor)]

    output = map_tensors(mark, output)
    return output, [marks.get(id(tensor), tensor) for tensor in tensors]


class _Mark(torch.autograd.Function):
    """The identity of a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return the memory of `tensor`, which users may change in place: autograd does not take it for a view."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient."""
        return gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        """Return the tangent."""
        return tangents[0]


def _marked(tensor: Tensor) -> Tensor:
    if tensor.grad_fn is None or is_bound_to_transform(tensor):
        return tensor
    with outside_transforms():
        one: Tensor = _Mark.apply(tensor)
    return one
