"""Keeping gradients that a compiled backward has averaged apart from those that still wait for their average.

The reducer remembers every gradient that arrives outside of its own iterations, because the next one must reduce it. It
must forget those that a compiled backward has averaged in graph. And a graph averages only what it computes: where
local gradients wait, the reducer has to do the next iteration, because `.grad` must end as the average of a sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ddp_impl.base.errors import ReductionError
from ddp_impl.torch_internals.autograd import call_when_backward_ends, in_compiled_backward
from ddp_impl.torch_internals.compile import keep_out_of_graphs


class LocalGradients:
    """Tells whether gradients of unsynchronised forwards are waiting, or may come, for the next reduction.

    `used_locally` is the reducer's own set of parameters (indices) whose gradients await reduction.
    """

    def __init__(self, used_locally: set[int]) -> None:
        """Watch `used_locally`."""
        self._used_locally = used_locally
        self._unsynchronised_forwards = False
        self._running: str | None = None  # the kind of backward that runs now

    @property
    def none_await_reduction(self) -> bool:
        """Whether a compiled backward may average: nothing else has to be averaged along with it."""
        self._forward_begins()
        return not self._used_locally and not self._unsynchronised_forwards

    def forward_will_be_reduced(self) -> None:
        """Note a forward whose backward the reducer will reduce, with all local gradients."""
        if self._running is not None:
            self._forward_begins()
        self._unsynchronised_forwards = False

    def forward_in_graph(self, outputs: Iterable[Tensor]) -> None:
        """Note a forward whose backward averages in graph."""
        self._tell_apart(outputs, "in graph")

    def forward_is_local(self, outputs: Iterable[Tensor]) -> None:
        """Note an unsynchronised forward."""
        self._forward_begins()
        self._unsynchronised_forwards = True
        self._tell_apart(outputs, "local")

    def _tell_apart(self, outputs: Iterable[Tensor], kind: str) -> None:
        def backward_begins(_: object) -> None:
            if self._running is None:
                self.begin(kind)
            elif self._running != kind:
                raise self._mixed()

        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(keep_out_of_graphs(backward_begins))

    def begin(self, kind: str) -> None:
        """Note that a backward of this kind begins; raise if gradients wait that it would not average."""
        if kind == "in graph" and self._used_locally:
            raise self._mixed()
        self._running = kind
        if not in_compiled_backward():  # which reports no end, unless the whole of it is one graph
            call_when_backward_ends(self._end)

    def _forward_begins(self) -> None:
        """Take it that a backward is over that did not report its end: of compiled autograd, or one that raised."""
        if self._running is not None:
            self._end()

    @keep_out_of_graphs
    def _end(self) -> None:
        if self._running == "in graph":
            self._used_locally.clear()
        self._running = None

    def _mixed(self) -> ReductionError:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return ReductionError(
            f"[rank {rank}] gradients of a forward inside no_sync() and of a synchronised forward that ran before it "
            "meet in .grad, but the latter was compiled to average its gradients by itself. Run the forwards inside "
            "no_sync() before the synchronised one, or leave the reduction to the reducer "
            "(torch._dynamo.config.optimize_ddp = True)."
        )
