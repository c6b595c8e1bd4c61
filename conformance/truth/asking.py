"""Outputs that require a gradient although no parameter was used for them, and are otherwise unchanged."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conformance.truth.casts import map_tensors
from conformance.truth.tensors import is_transformed, outside_transforms


def asking(output: Any, gradient_ready: Callable[[Tensor], None]) -> Any:
    """Return the output; a backward, not `torch.autograd.grad`, calls `gradient_ready` for each tensor in it.

    Tensors keep their memory, so changes in place still show elsewhere. Parameters, tensors of a transform and tensors
    of integers, which can have no gradient, are returned as they are.
    """
    asked: dict[int, Tensor] = {}

    def ask(tensor: Tensor) -> Tensor:
        can_have_one = tensor.is_floating_point() or tensor.is_complex()
        if isinstance(tensor, nn.Parameter) or not can_have_one or is_transformed(tensor):
            return tensor
        owner = _owner(tensor)
        if id(owner) not in asked:
            may_be_changed = owner.grad_fn is not None and not owner._is_view()
            one = torch.ones((), device=tensor.device, requires_grad=True)
            one.register_post_accumulate_grad_hook(gradient_ready)
            keeping_version = torch.autograd._unsafe_preserve_version_counter((owner,))  # type: ignore[attr-defined]
            with outside_transforms(), keeping_version:
                asked[id(owner)] = _Asks.apply(owner, may_be_changed, one)
        found = asked[id(owner)]
        return found if owner is tensor else tensor._view_func(found)  # type: ignore[attr-defined]

    return map_tensors(ask, output)


def _owner(tensor: Tensor) -> Tensor:
    """Return the base of an ordinary view whose base has a graph; else `tensor`."""
    base = tensor._base if tensor._is_view() else None
    is_ordinary = (
        base is None or torch._C._autograd._get_creation_meta(tensor) == torch._C._autograd.CreationMeta.DEFAULT
    )
    return base if base is not None and is_ordinary and base.grad_fn is not None else tensor


class _Asks(torch.autograd.Function):
    """The identity of a tensor, which brings `one` a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, in_place: bool, one: Tensor) -> Tensor:
        ctx.in_place, ctx.device = in_place, one.device
        if in_place:
            ctx.mark_dirty(tensor)
            return tensor
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor]:
        return gradients[0], None, torch.zeros((), device=ctx.device)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        if ctx.in_place:  # the tangent counts as changed like the tensor
            torch.autograd.graph.increment_version(tangents[0])
        return tangents[0]
