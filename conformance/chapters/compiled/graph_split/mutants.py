"""Mutants of chapter graph_split: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.errors import present
from conformance.mutants.bases import leaving_the_inside
from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.base import telemetry
from ddp_impl.base.options import BucketCaps
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.compile import graph_split
from ddp_impl.compile.compiled_calls import CompiledCalls, WhereAveraged


@replaces(TorchDDP, "_inside_ddp_forward")
@contextlib.contextmanager
def NeverCuts(ddp: TorchDDP, inside_ddp_forward: Call) -> Iterator[None]:
    """BUG: the compiler does not learn where buckets end, so that no reduction begins before the backward is over."""
    yield


@replaces(CompiledCalls, "reduction")
def CompilesWhole(calls: CompiledCalls, reduction: Call) -> WhereAveraged:
    """BUG: graphs are never cut, so that no reduction begins before the backward is over."""
    wanted: WhereAveraged = reduction()
    return WhereAveraged.WHOLE if wanted is WhereAveraged.SPLIT else wanted


@replaces(CompiledCalls, "exchanged")
def CutsOnlyAroundItself(calls: CompiledCalls, exchanged: Call, callback: Any) -> Any:
    """BUG: graphs are cut if the wrapper is compiled, and stay whole if what is compiled lies inside of it."""
    return leaving_the_inside(calls, exchanged, callback)


@replaces(CompiledCalls, "backend_for")
def KeepsParametersWithGraphs(calls: CompiledCalls, backend_for: Call, backend: Any, aim: Any, module: Any) -> Any:
    """BUG: the backend that Dynamo keeps with each graph holds the parameters, and they the graph."""
    ours = backend_for(backend, aim, module)
    if ours is not backend:
        ours.kept = list(module.parameters())
    return ours


@replaces(Ours, "attach_reducer")
def EndsWithItsWrapper(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: once the wrapper is garbage, nothing is averaged, although another object that has its attributes trains."""
    attach_reducer(members)
    weakref.finalize(ddp, ddp.reducer.remove_hooks)


@replaces(Ours, "averages_in_graph")
def CutsInEveryForward(ddp: Ours, averages_in_graph: Call) -> Any:
    """BUG: every forward has backends of its own, so that everything is compiled in every step."""
    ddp._compiled_calls.backends.clear()
    ddp._compiled_calls.callbacks.clear()
    return averages_in_graph()


@replaces(Ours, "attach_reducer")
def ReducesOtherBuckets(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: graphs are cut where `bucket_cap_mb` says, but the reducer's buckets span the parts from step 2 on."""
    attach_reducer(members)
    ddp.reducer.reduction.learnt.caps = BucketCaps(1 << 40, 1 << 40)


@as_part
class CompilesItsHooks(AutogradHooks):
    """BUG: Dynamo may capture the hooks of parameters, each of which it compiles again."""

    unmarked: CodeType | None = None

    def counting(self, index: int) -> Callable[[Tensor], None]:
        # Hooks of the same code, in a code object that is not marked as none to capture.
        marked: Any = super().counting(index)
        self.unmarked = self.unmarked or marked.__code__.replace(co_name="unmarked")
        return FunctionType(self.unmarked, marked.__globals__, closure=marked.__closure__)


@replaces(Ours, "forward_compiled")
def ForgetsTheMeshWhenCompiled(ddp: Ours, forward_compiled: Call, callback: Any, inputs: Any, kwargs: Any) -> Any:
    """BUG: once compiled, it averages over all ranks, whatever dimension of a mesh the module was wrapped for."""
    torch.compiler.disable(ddp._update_process_group)(present(dist.group.WORLD))
    return forward_compiled(callback, inputs, kwargs)


class TellsOnlyItsOwnLog(Ours):
    """BUG: how graphs are cut goes to a log that TORCH_LOGS=+dynamo does not show."""

    def forward_compiled(self, callback: Any, inputs: Any, kwargs: Any) -> Any:
        with mock.patch.object(telemetry, "dynamo_log", telemetry.log):
            return super().forward_compiled(callback, inputs, kwargs)


class ShowsNoGraphs(Ours):
    """BUG: TORCH_LOGS=ddp_graphs shows the graph before it is cut, and not its parts."""

    def forward_compiled(self, callback: Any, inputs: Any, kwargs: Any) -> Any:
        with mock.patch.object(graph_split, "log_artifacts"):
            return super().forward_compiled(callback, inputs, kwargs)


@replaces(CompiledCalls, "current")
def KeepsWhatItCalled(calls: Any, current: Call, module: Any) -> Any:
    """BUG: each forward has the module compiled for itself, which is compiled once, and keeps what it called."""
    calls.called = [*getattr(calls, "called", ()), torch.compile(module, backend="eager")]
    return current(module)
