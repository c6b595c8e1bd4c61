"""A parameter that no module has: a forward that uses none of the others is tied to it.

The outputs of such a forward tell nothing of a backward, or cannot have one. The rank would contribute nothing to this
reduction and its next gradients to it, when the others are one step ahead: silently wrong from then on. Tied outputs
require a gradient, and when the anchor gets its own, the rank knows that its part of the reduction is zeros. The anchor
gets none from `torch.autograd.grad`, nor do parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddp_impl.autograd.hooks import Listener
from ddp_impl.autograd.marks import identified
from ddp_impl.torch_internals.autograd import brought_by_backward


class Anchor:
    """Reports every backward from an output that is tied to it."""

    def __init__(self, device: torch.device) -> None:
        """Make the parameter on `device`, so that its gradient arrives in the thread in which others do."""
        self._leaf = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        self._node = get_gradient_edge(self._leaf).node
        self._handle: Any = None

    def report_to(self, listener: Listener) -> None:
        """Report to `listener` as long as it lives."""
        weak = weakref.ref(listener)

        def gradient_arrived(leaf: Tensor) -> None:
            leaf.grad = None
            if (heard := weak()) is not None:
                heard.anchor_reached()

        self._handle = self._leaf.register_post_accumulate_grad_hook(gradient_arrived)

    def is_coming(self) -> bool:
        """Whether the backward that runs now comes from an output that is tied to it."""
        return any(brought_by_backward([self._node]))

    def let_go(self) -> None:
        """Stop listening; else the hook, which C++ holds, would keep alive whoever listens, its process group too."""
        self._handle.remove()

    def tie(self, output: Any, tensors: Sequence[Tensor]) -> Any:
        """Return `output`, which holds `tensors`; those that can have a gradient ask for one."""
        asking = [one for one in tensors if one.is_floating_point() or one.is_complex()]
        # Whoever looks for the module's own parameter would find another.
        return identified(output, [one for one in asking if not isinstance(one, nn.Parameter)], self._leaf)
