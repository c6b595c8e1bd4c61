"""Mutants of chapter devices: DDPs that take a device for a CPU; `mutants.toml` names what detects it."""

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from conformance.mutants.bases import NothingToWaitFor
from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.reducer import reducer as reducer_module
from ddp_impl.reducer.expectations import FindUnused
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


@replaces(Reduction, "wait")
def DropsTheWait(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: averages are handed out without a wait for their reduction, as if the host's order were the device's."""
    buffer, _ = reduction.iteration.in_flight[bucket.index]
    reduction.iteration.in_flight[bucket.index] = (buffer, NothingToWaitFor())
    return wait_for(bucket)


@replaces(Reduction, "wait")
def WaitsOnAnotherStream(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: a stream of the DDP's own waits for the reductions, and not the current one."""
    with torch.Stream(reduction.device):
        return wait_for(bucket)


@replaces(Reduction, "send")
def ReadsInFlight(reduction: Reduction, start: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: a bucket is read, for a statistic, between its launch and the wait for it."""
    start(bucket, buffer)
    buffer.abs().amax()


@replaces(Reduction, "send")
def LaunchesOnAnotherStream(reduction: Reduction, start: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: collectives are launched under a stream that does not wait for the gradients."""
    with torch.Stream(reduction.device):
        start(bucket, buffer)


@replaces(Reduction, "wait")
def SynchronisesTheDevice(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: the host waits for the whole device before it hands out a bucket."""
    buffer = wait_for(bucket)
    torch.accelerator.synchronize()
    return buffer


@replaces(Reduction, "wait")
def AsksForANumber(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: every bucket is asked on the host whether it is finite."""
    buffer = wait_for(bucket)
    if not buffer.isfinite().all():
        raise ValueError("not finite")
    return buffer


@replaces(Reduction, "read_usage")
def ReadsUsageInEachStep(reduction: Reduction, read_usage: Call) -> Any:
    """BUG: with find_unused_parameters every rank reads what others used, also one that used all parameters."""
    refused = read_usage()
    reduction.num_users()
    return refused


@replaces(FindUnused, "forecast")
def TellsOthersOnTheDevice(expectation: FindUnused, forecast: Call, certain: Sequence[bool]) -> None:
    """BUG: ranks exchange their forecasts on the device, although their group serves the CPU, too."""
    with mock.patch("ddp_impl.wire.round.reduces_on_host", return_value=False):
        forecast(certain)


@replaces(Ours, "__init__")
def LaunchesAtTheEnd(ddp: Ours, init: Call, module: nn.Module, **options: Any) -> None:
    """BUG: all gradients are put into one bucket, which nothing overlaps with, whatever cap is asked for."""
    init(module, **{**options, "bucket_cap_mb": 1000})


@replaces(Reduction, "wait")
def TakesTheFutureAsDone(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: the value of a comm hook's future is taken as soon as the host has it, with no wait on the stream."""
    if reduction.comm_hook is not None:
        buffer, future = reduction.iteration.in_flight[bucket.index]
        reduction.iteration.in_flight[bucket.index] = (buffer, _Taken(future))
    return wait_for(bucket)


class _Taken:
    def __init__(self, future: torch.futures.Future[Tensor]) -> None:
        self._future = future

    def wait(self) -> Tensor:
        stream = torch.accelerator.current_stream()
        with torch.Stream(stream.device):
            value: Tensor = self._future.wait()
        return value


@replaces(Ours, "forward")
def ForgetsTheBuffersStream(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: buffers are broadcast under a stream of the DDP's own, for which forward does not wait."""
    for buffer in ddp.module.buffers():
        side = torch.Stream(buffer.device)
        with side:
            buffer.mul_(1.0)
    return forward(*inputs, **kwargs)


@replaces(Reduction, "wait")
def LetsGoInFlight(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: a copy of each bucket is made on another stream, and its memory is freed before the copy is over."""
    buffer = wait_for(bucket)
    scratch = torch.zeros_like(bucket.members[0].parameter)
    side = torch.Stream(reduction.device)
    side.wait_stream(torch.accelerator.current_stream(reduction.device))
    with side:
        scratch.add_(1.0)
    return buffer


@replaces(Reduction, "finalize_buckets")
def HandsOutOnAnotherStream(reduction: Reduction, hand_out_averages: Call) -> None:
    """BUG: averages are copied to the gradients under a stream of the DDP's own, for which no other stream waits."""
    with _behind(reduction.device):
        hand_out_averages()


@replaces(Reduction, "collect")
def CollectsOnAnotherStream(reduction: Reduction, collected: Call, bucket: Bucket) -> Any:
    """BUG: gradients are copied into buckets under a stream that does not wait for them."""
    with torch.Stream(reduction.device):
        return collected(bucket)


@replaces(Ours, "forward")
def StaysOnItsStream(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: after a forward, a stream of the DDP's own is the current one."""
    output = forward(*inputs, **kwargs)
    here = torch.accelerator.current_stream(ddp.device)
    side = torch.Stream(ddp.device)
    side.wait_stream(here)
    torch.accelerator.set_stream(side)
    return output


@replaces(Ours, "__init__")
def StaysOnItsDevice(ddp: Ours, init: Call, module: nn.Module, **options: Any) -> None:
    """BUG: construction makes the module's device the current one, and leaves it so."""
    init(module, **options)
    torch.accelerator.set_device_index((ddp.device.index or 0) + 1 if ddp.device.index == 0 else 0)


@replaces(Ours, "_pre_forward")
def MovesInputsOnAnotherStream(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: inputs are moved under a stream for which forward does not wait."""
    with _behind(ddp.device):
        inputs = tuple(one.to(ddp.device, copy=True) if isinstance(one, Tensor) else one for one in inputs)
    return pre_forward(*inputs, **kwargs)


@replaces(Ours, "__init__")
def IgnoresDeviceIds(ddp: Ours, init: Call, module: nn.Module, **options: Any) -> None:
    """BUG: inputs are moved to the parameters' device, whatever device_ids says."""
    init(module, **options)
    if ddp.device_ids:
        ddp.device_ids = [ddp.device.index]


@replaces(Ours, "__init__")
def NeverMovesInputs(ddp: Ours, init: Call, module: nn.Module, **options: Any) -> None:
    """BUG: inputs reach forward where the user put them, with device_ids too."""
    init(module, **options)
    ddp.device_ids = None


@replaces(Ours, "__init__")
def AlwaysMovesInputs(ddp: Ours, init: Call, module: nn.Module, **options: Any) -> None:
    """BUG: inputs are moved to the parameters' device without device_ids too."""
    init(module, **options)
    ddp.device_ids = [ddp.device.index]


@replaces(Ours, "_pre_forward")
def CopiesPinnedInputsInFlight(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: inputs in pinned memory are still being copied when forward returns."""
    moved = tuple(one.to(ddp.device, non_blocking=True) if isinstance(one, Tensor) else one for one in inputs)
    return pre_forward(*moved, **kwargs)


@replaces(Ours, "__init__")
def TakesTheFirstOfManyDevices(ddp: Ours, init: Call, module: nn.Module, **options: Any) -> None:
    """BUG: of several device_ids all but the first are ignored, and a module on several devices is not noticed."""
    if len({parameter.device for parameter in module.parameters()}) > 1:
        options["device_ids"] = None
    elif options.get("device_ids"):
        options["device_ids"] = options["device_ids"][:1]
    init(module, **options)


@replaces(Reduction, "launch")
def AveragesOneDevice(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: of a module on several devices, the gradients on the first one are averaged only."""
    if bucket.flat.device == reduction.device:
        launch(bucket)


@replaces(Ours, "_pre_forward")
def TrainsOnTheCurrentDevice(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: inputs are moved to the user's current device, and not to the one that device_ids names."""
    ddp.device_ids = [torch.accelerator.current_device_index()] if ddp.device_ids else None
    return pre_forward(*inputs, **kwargs)


@replaces(Ours, "__init__")
def KeepsMemoryElsewhere(ddp: Ours, init: Call, module: nn.Module, **options: Any) -> None:
    """BUG: a buffer of the DDP's own is kept on another device."""
    init(module, **options)
    other = (ddp.device.index + 1) % torch.accelerator.device_count()
    ddp._scratch = torch.zeros(16, device=torch.device(ddp.device.type, other))


@replaces(Ours, "named_module_buffers")
def CopiesNoHostBuffers(ddp: Ours, named_module_buffers: Call) -> dict[str, Tensor]:
    """BUG: buffers that are in host memory are not copied from rank 0."""
    found = named_module_buffers()
    return {name: buffer for name, buffer in found.items() if buffer.device == ddp.device}


@replaces(Ours, "divisor_in_join")
def ReadsTheCountInJoin(ddp: Ours, divisor: Call, num_syncing: Tensor) -> Any:
    """BUG: in a join context the host reads in each forward how many ranks have data, though nothing depends on it."""
    num_syncing.item()
    return divisor(num_syncing)


@replaces(Ours, "_pre_forward")
def CastsOnAnotherStream(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: with mixed precision, inputs are cast under a stream for which forward does not wait."""
    if ddp._caster is not None:
        with _behind(ddp.device):
            inputs = ddp._caster.cast_inputs(inputs)
    return pre_forward(*inputs, **kwargs)


@replaces(Ours, "forward")
def SynchronisesBeforeCasts(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: with mixed precision, the host waits for the device before each forward."""
    if ddp._caster is not None:
        torch.accelerator.synchronize(ddp.device)
    return forward(*inputs, **kwargs)


@replaces(Reduction, "finalize_buckets")
def StepsOnAnotherStream(reduction: Reduction, hand_out_averages: Call) -> None:
    """BUG: optimizers in backward step under a stream of the DDP's own, for which no other stream waits."""
    if not reduction.steps_optimizers:
        hand_out_averages()
        return
    with _behind(reduction.device):
        hand_out_averages()


@replaces(Reduction, "finalize_buckets")
def StepsOnTheHost(reduction: Reduction, hand_out_averages: Call) -> None:
    """BUG: with optimizers in backward the host waits for the averages."""
    if reduction.steps_optimizers:
        torch.accelerator.synchronize(reduction.device)
    hand_out_averages()


@replaces(Ours, "forward")
def ForgetsBufferFutures(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the futures that a buffer comm hook returns are never waited for."""
    output = forward(*inputs, **kwargs)
    ddp.reducer.reduction.post_backward_futures.clear()
    return output


@replaces(Reduction, "send")
def CallsHooksOnAnotherStream(reduction: Reduction, start: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: comm hooks are called under a stream that does not wait for the gradients."""
    with contextlib.nullcontext() if reduction.comm_hook is None else torch.Stream(reduction.device):
        start(bucket, buffer)


@replaces(Reduction, "wait")
def WaitsForHooksOnTheHost(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: with a comm hook the host waits for each bucket."""
    if reduction.comm_hook is not None:
        torch.accelerator.current_stream(reduction.device).synchronize()
    return wait_for(bucket)


@replaces(Reduction, "send")
def KeepsABucketEachStep(reduction: Reduction, start: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: a copy of each bucket is kept for a statistic, and never dropped."""
    reduction.__dict__.setdefault("kept", []).append(buffer.clone())
    start(bucket, buffer)


_REDUCERS: list[Reducer] = []


@replaces(Ours, "attach_reducer")
def KeepsItsBuckets(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: a list of the module keeps every reducer alive, and with it the buckets."""
    attach_reducer(members)
    _REDUCERS.append(ddp.reducer)


@as_part
class CopiesEachBucket(Reduction):
    """BUG: each bucket is reduced in a copy, and the copies are kept until the backward is over."""

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        self.__dict__.setdefault("copies", []).append([buffer.clone() for _ in range(3)])
        super().send(bucket, buffer)

    def finalize_buckets(self) -> None:
        super().finalize_buckets()
        self.__dict__.get("copies", []).clear()


@replaces(Reduction, "send")
def KeepsGradientsTwice(reduction: Reduction, start: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: with gradient_as_bucket_view a second copy of the buckets is kept."""
    reduction.__dict__.setdefault("last", {})[bucket.index] = buffer.clone()
    start(bucket, buffer)


@replaces(Reduction, "send")
def WaitsAtOnce(reduction: Reduction, start: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: the stream of the gradients waits for each bucket as soon as it is launched."""
    start(bucket, buffer)
    _, pending = reduction.iteration.in_flight[bucket.index]
    if reduction.comm_hook is None:
        pending.wait()


@replaces(Reducer, "launch_full_buckets")
def LaunchesAtTheEndOfBackward(reducer: Reducer, launch_full_buckets: Call) -> None:
    """BUG: all buckets wait for the last gradient."""
    if not any(reducer.arrivals.pending):
        launch_full_buckets()


@replaces(Ours, "_get_ddp_logging_data")
def SynchronisesToLog(ddp: Ours, get_ddp_logging_data: Call) -> Any:
    """BUG: the host waits for the device when it is asked for logging data."""
    torch.accelerator.synchronize(ddp.device)
    return get_ddp_logging_data()


@replaces(Ours, "_sync_buffers")
def ChecksBuffers(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: the host looks whether each buffer is finite before it is copied."""
    for buffer in ddp.module.buffers():
        if not buffer.isfinite().all():
            raise ValueError("not finite")
    sync_buffers(authoritative)


@replaces(Reduction, "wait")
def AsksInAStaticGraph(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: with a static graph the host looks in every step which averages are zeros."""
    buffer = wait_for(bucket)
    if reduction.options.static_graph:
        bool(buffer.any())
    return buffer


@replaces(Ours, "forward")
def StepsBesideTheOptimizer(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: before each forward the parameters are read on a stream that does not wait for the optimizer."""
    with torch.Stream(ddp.device):
        for parameter in ddp.module.parameters():
            parameter.detach().abs()
    return forward(*inputs, **kwargs)


@replaces(Reduction, "launch")
def WritesWhatTheUserReads(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: gradients are scaled in place, on another stream, on arrival: a hook of the user may read them."""
    with torch.Stream(reduction.device):
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0)
    launch(bucket)


@replaces(Ours, "synchronise_state")
def BroadcastsOnAnotherStream(ddp: Ours, synchronise_state: Call, with_buffers: bool, group_src: int = 0) -> None:
    """BUG: construction copies rank 0's parameters under a stream of the DDP's own, for which no other stream waits."""
    with _behind(ddp.device):
        synchronise_state(with_buffers, group_src)


def _behind(device: torch.device) -> torch.Stream:
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


@replaces(Reducer, "check_finished")
def NoticesAFailureLater(reducer: Reducer, check_finished: Call) -> None:
    """BUG: a forward does not wait until threads of the device have dropped a backward that raised."""
    with mock.patch.object(reducer_module, "in_backward", return_value=True):
        check_finished()
