"""Which parameters a forward's outputs can reach: a walk over the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


class GraphWalk:
    """Finds the parameters that a backward from given tensors would reach.

    The nodes that accumulate into the parameters are kept alive here, so that they keep their identity.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Remember the accumulation node of each parameter."""
        self._num_parameters = len(parameters)
        with torch.enable_grad():
            self.nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._index_of: dict[Node, int] = {node: index for index, node in enumerate(self.nodes)}

    def reachable(self, outputs: Iterable[Tensor]) -> set[int]:
        """Return indices of the parameters reachable from `outputs`; a parameter that is an output itself counts."""
        index_of = self._index_of
        found: set[int] = set()
        stack = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
        seen = set(stack)
        while stack:
            node = stack.pop()
            index = index_of.get(node)
            if index is not None:
                found.add(index)
                if len(found) == self._num_parameters:
                    break
                continue
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return found
