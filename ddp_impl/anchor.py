"""A parameter that no module has: a forward that uses none of the others is tied to it.

The outputs of such a forward tell nothing of a backward, or cannot have one. The rank would contribute nothing to this
reduction and its next gradients to it, when the others are one step ahead: silently wrong from then on. Tied outputs
require a gradient, and when the anchor gets its own, the rank knows that its part of the reduction is zeros. The anchor
gets none from `torch.autograd.grad`, nor do parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddp_impl.nested_tensors import map_tensors
from ddp_impl.torch_internals.autograd import brought_by_backward
from ddp_impl.torch_internals.tensors import is_bound_to_transform, outside_transforms


class Anchor:
    """Calls `reached` for every backward from an output that is tied to it."""

    def __init__(self, device: torch.device, reached: Callable[[], None]) -> None:
        """Make the parameter on `device`, so that its gradient comes in the thread in which others come."""
        self._leaf = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        self._node = get_gradient_edge(self._leaf).node
        self._handle = self._leaf.register_post_accumulate_grad_hook(self._gradient_came)
        self._reached = reached

    def is_coming(self) -> bool:
        """Whether the backward that runs now comes from an output that is tied to it."""
        return any(brought_by_backward([self._node]))

    def let_go(self) -> None:
        """Stop listening; else the hook, which C++ holds, would keep alive whoever listens, its process group too."""
        self._handle.remove()

    def tie(self, output: Any) -> Any:
        """Return `output` with copies of its tensors that require a gradient, where they can."""
        return map_tensors(self._tie, output)

    def _tie(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()) or is_bound_to_transform(tensor):
            return tensor
        if isinstance(tensor, nn.Parameter):  # whoever looks for the module's own would find a copy
            return tensor
        with outside_transforms():  # the tensor is no transform's, so that its backward is an ordinary one
            tied: Tensor = Tie.apply(self._leaf, tensor)
        return tied

    def _gradient_came(self, leaf: Tensor) -> None:
        leaf.grad = None
        self._reached()


class Tie(torch.autograd.Function):
    """The identity of a tensor, which gives an anchor a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        """Return the memory of `tensor`, which users may change in place: autograd does not take it for a view."""
        ctx.device = leaf.device
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return zero for the anchor, and the gradient."""
        return torch.zeros((), dtype=torch.float32, device=ctx.device), gradients[0]
