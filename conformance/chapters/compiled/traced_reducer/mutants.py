"""Mutants of chapter traced_reducer: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import dataclasses
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from conformance.errors import present
from conformance.mutants.bases import leaving_the_inside
from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api.distributed import InGraphBackwards
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.compile import fusion, in_graph
from ddp_impl.compile.compiled_calls import CompiledCalls, InGraph
from ddp_impl.compile.in_graph import InGraphBackend, InGraphReducer
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.torch_internals.autograd import in_compiled_backward
from ddp_impl.torch_internals.compile import inductor_compiler


@replaces(Ours, "averages_in_graph")
def AveragesOutsideGraphs(ddp: Ours, averages_in_graph: Call) -> InGraph | None:
    """BUG: asked to average in the graph, it averages from hooks all the same."""
    return None


@replaces(Ours, "averages_in_graph")
def SendsFullGradients(ddp: Ours, averages_in_graph: Call) -> InGraph | None:
    """BUG: in the graph, the dtype that a compressing hook asks for is forgotten."""
    found = averages_in_graph()
    return None if found is None else dataclasses.replace(found, wire_dtype=None)


@replaces(Ours, "averages_in_graph")
def AveragesUnderNoSync(ddp: Ours, averages_in_graph: Call) -> Any:
    """BUG: a graph that averages does so under `no_sync` as well."""
    before = ddp.require_backward_grad_sync
    ddp.require_backward_grad_sync = torch.is_grad_enabled()
    found = averages_in_graph()
    ddp.require_backward_grad_sync = before
    return found


@replaces(InGraphBackwards, "is_plain")
def AveragesWhatItComputes(backwards: InGraphBackwards, is_plain: Call) -> bool:
    """BUG: a graph averages what it computes, whatever `.grad` holds before and whichever hooks follow."""
    return True


class AveragesInGraphsForEver(AveragesWhatItComputes):  # type: ignore[misc, valid-type]
    """BUG: removed hooks stop the reducer, and not the compiled backward, which asks nobody whether it may average."""

    def averages_in_graph(self) -> InGraph | None:
        with mock.patch.object(AutogradHooks, "are_removed", False):
            return cast("InGraph | None", super().averages_in_graph())


@replaces(InGraphBackwards, "forward_in_graph")
def AveragesWhereBackwardsRun(
    backwards: InGraphBackwards, forward_in_graph: Call, outputs: Any, averages: InGraphReducer, in_use: object
) -> None:
    """BUG: a graph averages in every backward, of `torch.autograd.grad` too, which a rank may run alone."""
    vars(averages)["take_effect"] = lambda _: InGraphReducer.take_effect(averages, True)
    forward_in_graph(outputs, averages, in_use)


class _Forgetful(set[str]):
    def add(self, warning: str) -> None:
        pass


@replaces(Ours, "attach_reducer")
def WarnsOfWhatAGraphAverages(ddp: Ours, attach_reducer: Call, members: Any) -> None:
    """BUG: gradients that a graph has averaged are warned of as local ones, which they look like to the reducer."""
    attach_reducer(members)
    ddp.reducer.telemetry.warned = _Forgetful()


@replaces(Ours, "attach_reducer")
def FallsBackAlone(ddp: Ours, attach_reducer: Call, members: Any) -> None:
    """BUG: a rank whose forward is not one graph leaves its gradients to the reducer without asking the others."""
    attach_reducer(members)
    ddp._compiled_calls.agree = lambda mine: mine


@replaces(CompiledCalls, "exchanged")
def LeavesTheInsideToTheReducer(calls: CompiledCalls, exchanged: Call, callback: Any) -> Any:
    """BUG: only a wrapper that is compiled itself averages in the graph, or has its graphs cut."""
    return leaving_the_inside(calls, exchanged, callback)


@replaces(Ours, "averages_in_graph")
def AveragesTheMeshInGraphs(ddp: Ours, averages_in_graph: Call) -> InGraph | None:
    """BUG: a graph averages over all ranks, whatever group or dimension of a mesh the module was wrapped for."""
    found = averages_in_graph()
    return None if found is None else dataclasses.replace(found, group=present(dist.group.WORLD))


class _LateFuser(fusion.Fuser):
    """Puts each reduction behind all gradients that are not yet reduced."""

    def after(self, bucket: Any, cursor: Any) -> Any:
        rest = [node.args[0] for node in self.graph.find_nodes(op="call_function", target=fusion.AVERAGE)]
        return max([*rest, super().after(bucket, cursor)])


def _made(kind: type[InGraphBackend], backend: Any) -> Any:
    """Return `backend`, made one of `kind` if it averages in graphs."""
    if isinstance(backend, InGraphBackend):
        backend.__class__ = kind
    return backend


class _FusesLate(InGraphBackend):
    def fuse(self, gm: torch.fx.GraphModule) -> None:
        with mock.patch.object(fusion, "Fuser", _LateFuser):
            super().fuse(gm)


@replaces(CompiledCalls, "backend_for")
def ReducesBehindTheLastGradient(calls: CompiledCalls, backend_for: Call, *args: Any) -> Any:
    """BUG: a graph issues its reductions when the last gradient is there, so that they overlap with nothing."""
    return _made(_FusesLate, backend_for(*args))


class _FusesByRegistration(InGraphBackend):
    def fuse(self, gm: torch.fx.GraphModule) -> None:
        rules = present(self.reducer.rules)
        registered = dataclasses.replace(rules, order=tuple(sorted(rules.order, reverse=True)))
        with mock.patch.object(self.reducer, "rules", registered):
            super().fuse(gm)


@replaces(CompiledCalls, "backend_for")
def FusesInOrderOfRegistration(calls: CompiledCalls, backend_for: Call, *args: Any) -> Any:
    """BUG: a graph fills its buckets in reverse order of registration, in whatever order its layers run."""
    return _made(_FusesByRegistration, backend_for(*args))


def _compiler_that_copies() -> tuple[Any, Any]:
    compile_fx, partitioned_by = inductor_compiler()

    def copied(*given: Any) -> Any:
        settings = partitioned_by(*given)
        kind = type(settings["custom_partitioner_fn"])
        del kind.__deepcopy__, kind.__reduce__
        return settings

    return compile_fx, copied


class _LetsItBeCopied(InGraphBackend):
    def __call__(self, *given: Any, **options: Any) -> Any:
        with mock.patch.object(in_graph, "inductor_compiler", _compiler_that_copies):
            return super().__call__(*given, **options)


@replaces(CompiledCalls, "backend_for")
def LetsInductorCopyTheGroup(calls: CompiledCalls, backend_for: Call, *args: Any) -> Any:
    """BUG: when Inductor copies its settings, as compiled autograd has it do, it copies the process group, too."""
    return _made(_LetsItBeCopied, backend_for(*args))


@replaces(CompiledCalls, "forget_answer")
def RemembersTheAnswer(calls: CompiledCalls, forget_answer: Call) -> None:
    """BUG: a rank that returns to a group assumes that the others remember, too, whether all have one graph."""


@replaces(Reduction, "may_finalize_in_backward")
def RefusesCompiledBackwards(reduction: Reduction, may_finalize_in_backward: Call, *, allows_absence: bool) -> bool:
    """BUG: the reducer refuses every backward that compiled autograd runs."""
    return False


@replaces(Reduction, "finalize_buckets")
def HandsOutTheFirstBucketAlone(reduction: Reduction, finalize_buckets: Call) -> None:
    """BUG: in a backward that compiled autograd runs, only the bucket that left first is handed out."""
    for index in list(reduction.iteration.in_flight)[1:] if in_compiled_backward() else ():
        _, pending = reduction.iteration.in_flight.pop(index)
        pending.wait()
    finalize_buckets()


@replaces(Reduction, "is_frozen")
def AwaitsFrozenWhenCaptured(reduction: Reduction, is_frozen: Call, index: int) -> bool:
    """BUG: in a backward that compiled autograd runs, gradients of frozen parameters are waited for."""
    return not in_compiled_backward() and is_frozen(index)


@replaces(Reducer, "compiled_backward_ended")
def AwaitsAnotherWhenCaptured(reducer: Reducer, compiled_backward_ended: Call) -> None:
    """BUG: behind a backward that compiled autograd ran, the wrapper awaits another, whoever's forward that has."""
    compiled_backward_ended()
    reducer.prepare_for_backward([])


@replaces(Reduction, "may_finalize_in_backward")
def AcceptsEveryCapturedBackward(reduction: Reduction, may_finalize: Call, *, allows_absence: bool) -> bool:
    """BUG: the reducer begins backwards that compiled autograd runs also where it must learn of their end."""
    return may_finalize(allows_absence=False)
