"""Mutants of chapter traced_reducer: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import ManagedParameter
from ddp_impl.compile.local_gradients import LocalGradients
from ddp_impl.compile.who_averages import InGraph
from ddp_impl.torch_internals import call_when_backward_ends


class AveragesOutsideGraphs(DistributedDataParallel):
    """BUG: asked to average in the graph, it averages from hooks all the same."""

    def _averages_in_graph(self) -> InGraph | None:
        return None


class SendsFullGradients(DistributedDataParallel):
    """BUG: in the graph, the dtype that a compressing hook asks for is forgotten."""

    def _averages_in_graph(self) -> InGraph | None:
        found = super()._averages_in_graph()
        return None if found is None else dataclasses.replace(found, wire_dtype=None)


class AveragesUnderNoSync(DistributedDataParallel):
    """BUG: a graph that averages does so under `no_sync` as well."""

    def _averages_in_graph(self) -> InGraph | None:
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = torch.is_grad_enabled()
        found = super()._averages_in_graph()
        self.require_backward_grad_sync = before
        return found


class WaitsForTheEndOfCompiledBackwards(DistributedDataParallel):
    """BUG: it asks compiled autograd to report the end of a backward, which that does for whole graphs alone."""

    class OwnGradients(LocalGradients):
        """Always asks."""

        def _begin(self, kind: str) -> None:
            self._running = kind
            call_when_backward_ends(self._end)

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self._local_gradients.__class__ = self.OwnGradients
