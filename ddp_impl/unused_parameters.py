"""Which parameters the outputs of forwards can reach: a walk over the autograd graph, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ddp_impl.torch_internals import function_of


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

    def uses_any(self, outputs: Iterable[Tensor]) -> bool:
        """Whether any parameter is reachable from `outputs`; a few steps if one is, the whole graph if none."""
        return bool(self._walk(outputs, enough=1)[0])

    def reachable(self, outputs: Iterable[Tensor]) -> set[int] | None:
        """Return indices of the parameters reachable from `outputs`; a parameter that is an output itself counts.

        None if a node on the way may hide others: its backward runs Python that may begin a backward of its own, as a
        reentrant checkpoint does.
        """
        found, kinds = self._walk(outputs, enough=self._num_parameters)
        return None if len(found) < self._num_parameters and any(map(_may_hide, kinds)) else found

    def _walk(self, outputs: Iterable[Tensor], enough: int) -> tuple[set[int], set[type]]:
        """Return `enough` of the parameters reachable, or all, and the types of the nodes on the way to them."""
        index_of = self._index_of
        found: set[int] = set()
        kinds: set[type] = set()
        stack = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
        seen = set(stack)
        while stack:
            node = stack.pop()
            index = index_of.get(node)
            if index is not None:
                found.add(index)
                if len(found) == enough:
                    break
                continue
            kinds.add(type(node))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return found, kinds


def _may_hide(kind: type) -> bool:
    """Whether the backward of a node may use parameters that a walk does not find beyond it.

    Of torch's own functions only the checkpoint does, of ours `Tie`: it stands for a forward of which nothing is known.
    Of others nobody knows.
    """
    function = function_of(kind)
    if function is None:
        return False
    module = function.__module__
    return not module.startswith(("torch.", "ddp_impl.")) or module in ("torch.utils.checkpoint", "ddp_impl.anchor")


class Reach:
    """The parameters that the forwards since the last reduction can reach, as far as their graphs were walked.

    A walk finds unused parameters before the backward, so that they hold up no bucket. It costs time, and at the end of
    the backward the reducer knows the same without it. So it walks graphs (`is_walked`) only after an iteration in
    which some parameter was unused.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Begin with nothing reached, and do not walk."""
        self.walk = GraphWalk(parameters)
        self.is_walked = False
        self.reached: set[int] | None = set()  # None: unknown
        self.is_announced = False  # the backward will report when it comes to an output

    def of(self, outputs: Sequence[Tensor]) -> set[int] | None:
        """Return the parameters that one forward's `outputs` reach; None if that is unknown.

        The reducer hears of no backward through outputs that are parameters themselves, so it could not exclude other
        parameters in time: what such outputs alone reach counts as unknown.
        """
        if not self.is_walked or all(output.grad_fn is None for output in outputs):
            return None
        with torch.autograd.profiler.record_function("ddp_impl.search_unused_parameters"):
            return self.walk.reachable(outputs)

    def begin(self, reached: set[int] | None) -> None:
        """Forget the forwards before; the first one after them reaches `reached`."""
        self.reached = reached
        self.is_announced = False

    def widen(self, reached: set[int] | None) -> None:
        """Add what one more forward reaches."""
        self.reached = None if self.reached is None or reached is None else self.reached | reached
