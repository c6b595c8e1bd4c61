"""Mutants of chapter telemetry: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.base.telemetry import Telemetry, now_ns
from ddp_impl.buckets import gradients
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.buckets.gradients import EarlyMoves
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.wire import collectives


@replaces(Reducer, "finalize")
def StumblesOverDebugLevels(reducer: Reducer, finalize: Call) -> None:
    """BUG: at a debug level, gradients are divided twice."""
    finalize()
    if get_debug_level() != DebugLevel.OFF:
        for member in reducer.members:
            if member.parameter.grad is not None:
                member.parameter.grad.div_(2)


Data = dict[str, int | str]


@replaces(Ours, "_get_ddp_logging_data")
def TellsOverlapInMicroseconds(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the overlap alone is logged in microseconds, not in nanoseconds."""
    data = logging_data()
    return data | {name: int(data[name]) // 1000 for name in data if name.endswith("compute_comm_overlap_time")}


@replaces(Ours, "_get_ddp_logging_data")
def CountsFrozenParameters(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the logged number of parameters counts those that are not averaged."""
    return {**logging_data(), "num_parameter_tensors": len(list(ddp.module.parameters())) + 1}


@replaces(Ours, "_get_ddp_logging_data")
def TellsOneDictionary(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the logging data are one dictionary, which changes while its reader looks at it."""
    kept: Data = vars(ddp).setdefault("kept", {})
    kept.update(logging_data())
    return kept


@replaces(Ours, "_get_ddp_logging_data")
def CommunicatesToTell(ddp: Ours, logging_data: Call) -> Data:
    """BUG: asking for the logging data waits for the other ranks."""
    data: Data = logging_data()
    collectives.all_reduce_now(torch.zeros(1), ddp.process_group)
    return data


@replaces(Ours, "_get_ddp_logging_data")
def TellsDefaultCaps(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the logged bucket cap is the default one."""
    return {**logging_data(), "bucket_cap_bytes": 25 * 1024 * 1024}


@replaces(Ours, "_get_ddp_logging_data")
def TellsFirstBuckets(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the logged buckets are those before they were rebuilt."""
    data: Data = logging_data()
    first: Data = vars(ddp).setdefault("first", data)
    names = ("bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")
    return {**data, **{name: first["bucket_sizes"] for name in names if name in data}}


@replaces(Ours, "_get_ddp_logging_data")
def TellsMicroseconds(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the logged durations are in microseconds, not in nanoseconds."""
    data = logging_data()
    names = [name for name in data if name.endswith("_time") and not name.startswith("avg_")]
    return {**data, **{name: int(data[name]) // 1000 for name in names}}


@replaces(TorchDDP, "_get_ddp_logging_data")
def DividesByAllSteps(ddp: TorchDDP, logging_data: Call) -> Data:
    """BUG: averages are sums over sampled steps, divided by the number of all steps."""
    data: Data = logging_data()
    num_steps = int(data.get("iteration", 0)) + 1
    names = [name for name in data if name.startswith("avg_")]
    return {**data, **{name: int(data[name]) * min(num_steps, 10) // num_steps for name in names}}


@replaces(Ours, "_get_ddp_logging_data")
def TellsLastAsAverage(ddp: Ours, logging_data: Call) -> Data:
    """BUG: averages are the times of the last step."""
    data = logging_data()
    return {**data, **{name: data[name.removeprefix("avg_")] for name in data if name.startswith("avg_")}}


@replaces(Ours, "_get_ddp_logging_data")
def TellsNothingUnused(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the logged size of unused parameters is 0."""
    return {**logging_data(), "unused_parameter_size": 0}


@replaces(Ours, "_get_ddp_logging_data")
def AlwaysLooksStatic(ddp: Ours, logging_data: Call) -> Data:
    """BUG: every graph is logged as one that could be static."""
    return {**logging_data(), "can_set_static_graph": 1}


@replaces(Ours, "_get_ddp_logging_data")
def TellsNoError(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the logging data do not report an error."""
    return {name: value for name, value in logging_data().items() if name not in ("has_error", "error")}


@replaces(Ours, "_get_ddp_logging_data")
def TellsWholeEnvironment(ddp: Ours, logging_data: Call) -> Data:
    """BUG: variables of other backends, and all others, are in the logging data."""
    return {**{name.lower(): value for name, value in os.environ.items()}, "nccl_debug": "N/A", **logging_data()}


@replaces(Ours, "_get_ddp_logging_data")
def TellsRankOfWorld(ddp: Ours, logging_data: Call) -> Data:
    """BUG: the logged world size is that of the default group, plus one."""
    return {**logging_data(), "world_size": dist.get_world_size() + 1}


@as_part
class CountsPauses(Reducer):
    """BUG: the time between forward and backward is counted as time of backward."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        super().prepare_for_backward(outputs)
        self._prepared = now_ns()

    def finalize(self) -> None:
        self.telemetry.current.backward_start = self._prepared
        super().finalize()


class SamplesEveryStep(Ours):
    """BUG: the sample rate is ignored: every step is sampled."""

    def attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super().attach_reducer(members)
        self.reducer.telemetry.sample_rate = 1

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(f"the sample rate must be at least 1, got {sample_rate}")


@replaces(Ours, "_set_ddp_runtime_logging_sample_rate")
def TakesAnyRate(ddp: Ours, set_ddp_runtime_logging_sample_rate: Call, sample_rate: int) -> None:
    """BUG: a sample rate of zero is accepted."""
    ddp.reducer.telemetry.sample_rate = max(1, sample_rate)


@replaces(BucketPlanning, "log_plan")
def SaysNothingOfItsBuckets(planning: BucketPlanning, log_plan: Call, what: str) -> None:
    """BUG: a rebuild of buckets leaves no trace in the log."""


class _Unsampled(Telemetry):
    def end(self) -> bool:
        super().end()
        return False


class TellsNoTimes(Ours):
    """BUG: no iteration is sampled, so that no times are logged."""

    def attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super().attach_reducer(members)
        self.reducer.telemetry = self.reducer.reduction.telemetry = _Unsampled()


@replaces(BucketPlanning, "log_plan")
def SaysNothingWithoutADebugLevel(planning: BucketPlanning, log_plan: Call, what: str) -> None:
    """BUG: TORCH_CPP_LOG_LEVEL is not read."""
    if get_debug_level() != DebugLevel.OFF:
        log_plan(what)


@replaces(Reduction, "collect")
def HidesCopies(reduction: Reduction, collected: Call, bucket: Bucket) -> Tensor:
    """BUG: a profiler does not see gradients being copied into buckets."""
    with mock.patch.object(gradients, "shown_to_profilers", return_value=nullcontext()):
        buffer: Tensor = collected(bucket)
    return buffer


@replaces(EarlyMoves, "move")
def HidesEarlyMoves(moves: EarlyMoves, arrived: Call, index: int) -> None:
    """BUG: a profiler does not see large gradients that move into their bucket when they arrive."""
    with mock.patch.object(gradients, "shown_to_profilers", return_value=nullcontext()):
        arrived(index)
