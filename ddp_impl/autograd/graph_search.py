"""Which parameters autograd can reach from given tensors, and which of them the backward that runs now will come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ddp_impl.torch_internals.autograd import brought_by_backward, shown_to_profilers


class GraphSearch:
    """Asks about the nodes that accumulate into the parameters; it keeps them alive, so that they stay the same."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Remember the accumulation node of each parameter."""
        with torch.enable_grad():
            self.nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._known = set(self.nodes)

    def uses_any(self, outputs: Iterable[Tensor]) -> bool:
        """Whether any parameter is reachable from `outputs`; a few steps if one is, the whole graph if none."""
        tensors = [tensor for tensor in outputs if tensor.requires_grad]
        leaves = [tensor for tensor in tensors if tensor.grad_fn is None]  # which have no node within a transform
        if any(getattr(node, "variable", None) is leaf for leaf in leaves for node in self.nodes):
            return True
        stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen = set[Node](stack)
        while stack:
            node = stack.pop()
            if node in self._known:
                return True
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return False

    def coming(self) -> list[bool]:
        """Return for each parameter whether the backward that runs now will bring it a gradient; False outside of one.

        What a function hides that begins a backward of its own counts as not coming.
        """
        with shown_to_profilers("torch.distributed.ddp.reducer::search_unused_parameters"):
            return brought_by_backward(self.nodes)
