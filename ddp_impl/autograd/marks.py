"""Identities that the reducer puts into the graph right behind what forward returns, so that it hears of backwards.

The tensors remain what they are: whatever shares their memory goes on to see what a loop changes in place, in value and
gradient. By its marks a reducer knows which backward is its own, and keeps no graph alive: a node of a function in
Python can be held weakly, one of torch's cannot.

Marks of a forward that uses no parameter give a gradient to the `Anchor`, a parameter that no module has. When it gets
one, the rank knows that its part of the reduction is zeros; else its next gradients would join the others' present
reduction. `torch.autograd.grad` brings it none.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddp_impl.autograd.hooks import Listener, one_at_a_time
from ddp_impl.base.nested_tensors import map_tensors
from ddp_impl.torch_internals.autograd import brought_by_backward
from ddp_impl.torch_internals.tensors import (
    has_sizes,
    is_bound_to_transform,
    is_in_graph_since,
    is_more_than_a_view,
    keeping_versions,
    outside_transforms,
    owner_in_graph,
    view_again,
)


def marked(output: Any, tensors: Sequence[Tensor], since: int) -> Any:
    """Return `output`, which holds `tensors`, with a mark behind each that is in the graph since `since`."""
    return identified(output, [tensor for tensor in tensors if is_in_graph_since(tensor, since)])


def identified(output: Any, tensors: Sequence[Tensor], leaf: Tensor | None = None) -> Any:
    """Return `output`, which holds `tensors`, with an identity behind each, which gives `leaf` a gradient of zero.

    It goes behind the tensor that owns the memory, in place, and views are viewed again from there. A tensor without a
    graph, that nobody may change, or of which all gradient is awaited (`retain_grad`) is replaced by one of its memory.
    """
    replaced: dict[int, Tensor] = {}
    owners: dict[int, Tensor] = {}
    with outside_transforms():
        for tensor in tensors:
            if id(tensor) not in replaced and has_sizes(tensor) and not is_bound_to_transform(tensor):
                replaced[id(tensor)] = _identified(tensor, owners, leaf)
    if all(replaced.get(id(tensor), tensor) is tensor for tensor in tensors):
        return output
    return map_tensors(lambda tensor: replaced.get(id(tensor), tensor), output)


def _identified(tensor: Tensor, owners: dict[int, Tensor], leaf: Tensor | None) -> Tensor:
    owner = owner_in_graph(tensor)
    if owner is None or owner.retains_grad or (owner is not tensor and is_more_than_a_view(tensor)):
        another: Tensor = Identity.apply(tensor, False, leaf)
    else:
        if id(owner) not in owners:
            with keeping_versions([owner]):  # nothing changes, and autograd may have saved the values
                owners[id(owner)] = Identity.apply(owner, True, leaf)
        if owner is tensor:
            return tensor
        another = view_again(tensor, owner)
    for name, value in vars(tensor).items():  # what users have noted on it; what a class keeps there is its own
        vars(another).setdefault(name, value)
    return another


class Identity(torch.autograd.Function):
    """The identity of a tensor, which is changed in place, or returned as one of its memory that is no view of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, in_place: bool, leaf: Tensor | None) -> Tensor:
        """Return the tensor."""
        ctx.set_materialize_grads(False)  # what is no gradient stays none
        ctx.in_place, ctx.device = in_place, None if leaf is None else leaf.device
        if not in_place:
            return tensor.detach()
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, Tensor | None]:
        """Return the gradient, and zero for the leaf."""
        zero = None if ctx.device is None else torch.zeros((), dtype=torch.float32, device=ctx.device)
        return gradients[0], None, zero

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        """Return the tangent, which autograd wants to see changed where the tensor is."""
        if ctx.in_place:
            torch.autograd.graph.increment_version(tangents[0])
        return tangents[0]


class Anchor:
    """Reports every backward from an output that is tied to it."""

    def __init__(self, device: torch.device, listener: Listener, *, has_threads: bool = False) -> None:
        """Make the parameter on `device`, as gradients arrive in a thread of it; report while `listener` lives."""
        self._leaf = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        self._node = get_gradient_edge(self._leaf).node
        weak = weakref.ref(listener)

        def gradient_arrived(leaf: Tensor) -> None:
            leaf.grad = None
            if (reducer := weak()) is not None:
                reducer.anchor_reached()

        hook = one_at_a_time(gradient_arrived) if has_threads else gradient_arrived
        self._handle = self._leaf.register_post_accumulate_grad_hook(hook)

    def will_be_reached(self) -> bool:
        """Whether the running backward will reach the anchor from an output that is tied to it."""
        return any(brought_by_backward([self._node]))

    def let_go(self) -> None:
        """Stop listening; else the hook, which C++ holds, would keep alive whoever listens, its process group too."""
        self._handle.remove()

    def tie(self, output: Any, tensors: Sequence[Tensor]) -> Any:
        """Return `output`, which holds `tensors`; those that can have a gradient ask for one."""
        asking = [one for one in tensors if one.is_floating_point() or one.is_complex()]
        # Whoever looks for the module's own parameter would find another.
        return identified(output, [one for one in asking if not isinstance(one, nn.Parameter)], self._leaf)
