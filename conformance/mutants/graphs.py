"""DDPs that are wrong under `torch.compile`, each in one way: `ddp_impl`, changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import ManagedParameter
from ddp_impl.compile.fusion import Fusion
from ddp_impl.compile.who_averages import InGraph, Reduction


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


class CompilesWhole(DistributedDataParallel):
    """BUG: graphs are never cut, so that no reduction begins before the backward is over."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        if self._compiled_calls.reduction is Reduction.SPLIT:
            self._compiled_calls.reduction = Reduction.WHOLE


class FusesNothing(DistributedDataParallel):
    """BUG: in the graph every gradient is a collective of its own."""

    def _averages_in_graph(self) -> InGraph | None:
        self._compiled_calls.fusion = Fusion.NONE
        return super()._averages_in_graph()
