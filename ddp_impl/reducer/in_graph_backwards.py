"""Who averages when a backward reaches a forward that was compiled to average its own gradients.

A graph averages what it computes, and a DDP what accumulates. They are the same where every parameter of the wrapper
accumulates in this backward, into an empty `.grad`, from this forward alone, and no hook of the user's looks on. Then
the graph averages. Otherwise its collectives do nothing in this backward, its gradients stay local, and the reducer
averages what stands in `.grad` behind the hooks, as in eager mode; or nobody does, where nothing accumulates
(`torch.autograd.grad`).

A rank decides by itself: the reducer's buckets are those of a graph that concatenates, so another rank need not decide
alike. Where the user has graphs coalesce, or fuse nothing, it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ddp_impl.compile.in_graph import InGraphReducer
from ddp_impl.reducer.iteration import Progress
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.torch_internals.autograd import brought_by_backward, current_backward, in_compiled_backward
from ddp_impl.torch_internals.tensors import has_tensor_hooks, num_post_accumulate_hooks


class InGraphBackwards:
    """Decides it for the backwards of one wrapper, whose reducer is `reducer`."""

    def __init__(self, reducer: Reducer) -> None:
        """Await no backward."""
        self._reducer = reducer
        self._num_forwards = 0  # since the last such backward that accumulates began
        self._number = -1  # of that backward
        self._is_plain = True

    def forward_ran(self) -> None:
        """Note a forward whose backward may be part of another one's: any but those that the reducer awaits."""
        self._num_forwards += 1

    def forward_in_graph(self, outputs: Sequence[Tensor], averages: InGraphReducer, in_use: object) -> None:
        """Note a forward whose graph averages as `averages` says; its outputs keep `in_use` alive."""
        self.forward_ran()
        averages.take_effect(True)  # unless its backward says otherwise
        self._reducer.warns_of_local = False
        self._reducer.reduction.used_locally.clear()  # the graph brings all; one captured with others would differ
        self._reducer.hooks.on_backward(outputs, partial(self._reached, averages), in_use)

    def _reached(self, averages: InGraphReducer) -> None:
        if torch.compiler.is_dynamo_compiling():  # with fullgraph=True, which leaves no hook as it is
            return
        number = current_backward()  # -1 in each that compiled autograd runs
        if number != self._number or (number == -1 and self._num_forwards):
            self._number, self._is_plain = number, False
            comes = brought_by_backward(self._reducer.reduction.graph.nodes)
            if self.accumulates(comes):
                self._is_plain = self._num_forwards <= 1 and self.nothing_else_accumulates(comes)
                self._num_forwards = 0
                if not self._is_plain:
                    self._reducer.output_reached()
        averages.take_effect(self._is_plain)

    def accumulates(self, comes: Sequence[bool]) -> bool:
        """Whether this backward accumulates gradients; compiled autograd has no engine to ask."""
        return any(comes) or in_compiled_backward()

    def nothing_else_accumulates(self, comes: Sequence[bool]) -> bool:
        """Whether a graph computes all that this backward accumulates; `comes`: to which parameters it comes."""
        reducer = self._reducer
        return (
            reducer.reduction.iteration.progress is Progress.IDLE
            and (all(comes) or in_compiled_backward())
            and all(
                member.parameter.grad is None
                and num_post_accumulate_hooks(member.parameter) == 1  # the reducer's
                and not has_tensor_hooks(member.parameter)
                for member in reducer.members
            )
        )
