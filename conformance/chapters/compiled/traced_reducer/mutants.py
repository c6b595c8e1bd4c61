"""Mutants of chapter traced_reducer: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.mutants.bases import LeavesTheInside
from conformance.own_mistake import present
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import ManagedParameter
from ddp_impl.compile import fusion
from ddp_impl.compile.in_graph import InGraphBackend
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


class FallsBackAlone(DistributedDataParallel):
    """BUG: a rank whose forward is not one graph leaves its gradients to the reducer without asking the others."""

    def _agree(self, mine: bool) -> bool:
        return mine


class LeavesTheInsideToTheReducer(LeavesTheInside):
    """BUG: only a wrapper that is compiled itself averages in the graph, or has its graphs cut."""


class AveragesTheMeshInGraphs(DistributedDataParallel):
    """BUG: a graph averages over all ranks, whatever group or dimension of a mesh the module was wrapped for."""

    def _averages_in_graph(self) -> InGraph | None:
        found = super()._averages_in_graph()
        return None if found is None else dataclasses.replace(found, group=present(dist.group.WORLD))


class ReducesBehindTheLastGradient(DistributedDataParallel):
    """BUG: a graph issues its reductions when the last gradient is there, so that they overlap with nothing."""

    class OwnFuser(fusion._Fuser):
        """Puts each reduction behind all gradients that are not yet reduced."""

        def _after(self, bucket: Any, cursor: Any) -> Any:
            rest = [node.args[0] for node in self._graph.find_nodes(op="call_function", target=fusion.AVERAGE)]
            return max([*rest, super()._after(bucket, cursor)])

    class OwnBackend(InGraphBackend):
        """Fuses late."""

        def _fuse(self, gm: torch.fx.GraphModule) -> None:
            with mock.patch.object(fusion, "_Fuser", ReducesBehindTheLastGradient.OwnFuser):
                super()._fuse(gm)

    def _averages_in_graph(self) -> InGraph | None:
        calls: Any = self._compiled_calls
        if "_compile" not in vars(calls):
            calls._compile = functools.partial(self._compiled_late, calls._compile)
        return super()._averages_in_graph()

    def _compiled_late(self, compile_: Any, *args: Any) -> Any:
        backend, call = compile_(*args)
        if isinstance(backend, InGraphBackend):
            backend.__class__ = self.OwnBackend
        return backend, call
