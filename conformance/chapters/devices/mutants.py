"""Mutants of chapter devices: DDPs that take a device for a CPU; `mutants.toml` names the requirements that tell."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.mutants.bases import NothingToWaitFor, Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.parameter_usage import ParameterUsage
from ddp_impl.reducer import Reducer


class DropsTheWait(Reducing):
    """BUG: averages are handed out without a wait for their reduction, as if the host's order were the device's."""

    class OwnReducer(Reducer):
        """Waits for nothing."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            buffer, _ = self.iteration.in_flight[bucket.index]
            self.iteration.in_flight[bucket.index] = (buffer, NothingToWaitFor())
            return super()._wait_for(bucket)


class WaitsOnAnotherStream(Reducing):
    """BUG: a stream of the DDP's own waits for the reductions, and not the current one."""

    class OwnReducer(Reducer):
        """Waits elsewhere."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            with torch.Stream(self.device):
                return super()._wait_for(bucket)


class ReadsInFlight(Reducing):
    """BUG: a bucket is read, for a statistic, between its launch and the wait for it."""

    class OwnReducer(Reducer):
        """Is curious."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            super()._start(bucket, buffer)
            buffer.abs().amax()


class LaunchesOnAnotherStream(Reducing):
    """BUG: collectives are launched under a stream that does not wait for the gradients."""

    class OwnReducer(Reducer):
        """Launches elsewhere."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            with torch.Stream(self.device):
                super()._start(bucket, buffer)


class SynchronisesTheDevice(Reducing):
    """BUG: the host waits for the whole device before it hands out a bucket."""

    class OwnReducer(Reducer):
        """Is cautious."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            buffer = super()._wait_for(bucket)
            torch.accelerator.synchronize()
            return buffer


class AsksForANumber(Reducing):
    """BUG: every bucket is asked on the host whether it is finite."""

    class OwnReducer(Reducer):
        """Checks."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            buffer = super()._wait_for(bucket)
            if not buffer.isfinite().all():
                raise ValueError("not finite")
            return buffer


class ReadsUsageInEachStep(Reducing):
    """BUG: with find_unused_parameters every rank reads what others used, also one that used all parameters."""

    class OwnUsage(ParameterUsage):
        """Is curious."""

        def end_agreeing(self) -> None:
            """Wait for the device."""
            super().end_agreeing()
            self.num_users()


class LaunchesAtTheEnd(DistributedDataParallel):
    """BUG: all gradients are put into one bucket, which nothing overlaps with, whatever cap the user asks for."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Ignore the cap."""
        super().__init__(module, **{**options, "bucket_cap_mb": 1000})


class TakesTheFutureAsDone(Reducing):
    """BUG: the value of a comm hook's future is taken as soon as the host has it, with no wait on the stream."""

    class OwnReducer(Reducer):
        """Takes the value."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            if self.comm_hook is not None:
                buffer, future = self.iteration.in_flight[bucket.index]
                self.iteration.in_flight[bucket.index] = (buffer, _Taken(future))
            return super()._wait_for(bucket)


class _Taken:
    def __init__(self, future: torch.futures.Future[Tensor]) -> None:
        self._future = future

    def wait(self) -> Tensor:
        """Return what the host has."""
        stream = torch.accelerator.current_stream()
        with torch.Stream(stream.device):
            value: Tensor = self._future.wait()
        return value


class ForgetsTheBuffersStream(DistributedDataParallel):
    """BUG: buffers are broadcast under a stream of the DDP's own, for which forward does not wait."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Broadcast elsewhere."""
        for buffer in self.module.buffers():
            side = torch.Stream(buffer.device)
            with side:
                buffer.mul_(1.0)
        return super().forward(*inputs, **kwargs)


class LetsGoInFlight(Reducing):
    """BUG: a copy of each bucket is made on another stream, and its memory let go of before the copy is over."""

    class OwnReducer(Reducer):
        """Copies, and forgets to tell the allocator."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            buffer = super()._wait_for(bucket)
            scratch = torch.zeros_like(bucket.members[0].parameter)
            side = torch.Stream(self.device)
            side.wait_stream(torch.accelerator.current_stream(self.device))
            with side:
                scratch.add_(1.0)
            return buffer


class HandsOutOnAnotherStream(Reducing):
    """BUG: averages are copied to the gradients under a stream of the DDP's own, for which nobody waits."""

    class OwnReducer(Reducer):
        """Hands out elsewhere."""

        def _hand_out_averages(self) -> None:
            with _behind(self.device):
                super()._hand_out_averages()


class CollectsOnAnotherStream(Reducing):
    """BUG: gradients are copied into buckets under a stream that does not wait for them."""

    class OwnReducer(Reducer):
        """Collects elsewhere."""

        def _collected(self, bucket: Bucket) -> Tensor:
            with torch.Stream(self.device):
                return super()._collected(bucket)


class StaysOnItsStream(DistributedDataParallel):
    """BUG: after a forward, a stream of the DDP's own is the current one."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Set a stream, and leave it set."""
        output = super().forward(*inputs, **kwargs)
        here = torch.accelerator.current_stream(self.device)
        side = torch.Stream(self.device)
        side.wait_stream(here)
        torch.accelerator.set_stream(side)
        return output


class StaysOnItsDevice(DistributedDataParallel):
    """BUG: construction makes the module's device the current one, and leaves it so."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Set a device."""
        super().__init__(module, **options)
        torch.accelerator.set_device_index((self.device.index or 0) + 1 if self.device.index == 0 else 0)


class MovesInputsOnAnotherStream(DistributedDataParallel):
    """BUG: inputs are moved under a stream for which forward does not wait."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with _behind(self.device):
            inputs = tuple(one.to(self.device, copy=True) if isinstance(one, Tensor) else one for one in inputs)
        return super()._pre_forward(*inputs, **kwargs)


class IgnoresDeviceIds(DistributedDataParallel):
    """BUG: inputs are moved to the parameters' device, whatever device_ids says."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Take another device."""
        super().__init__(module, **options)
        if self.device_ids:
            self.device_ids = [self.device.index]


class NeverMovesInputs(DistributedDataParallel):
    """BUG: inputs come to forward where the user put them, with device_ids too."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Forget the ids."""
        super().__init__(module, **options)
        self.device_ids = None


class AlwaysMovesInputs(DistributedDataParallel):
    """BUG: inputs are moved to the parameters' device without device_ids too."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Make ids up."""
        super().__init__(module, **options)
        self.device_ids = [self.device.index]


class CopiesPinnedInputsInFlight(DistributedDataParallel):
    """BUG: inputs in pinned memory are still being copied when forward returns."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        moved = tuple(one.to(self.device, non_blocking=True) if isinstance(one, Tensor) else one for one in inputs)
        return super()._pre_forward(*moved, **kwargs)


class TakesTheFirstOfManyDevices(DistributedDataParallel):
    """BUG: of several device_ids all but the first are ignored, and a module on several devices is not noticed."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Drop what does not fit."""
        if len({parameter.device for parameter in module.parameters()}) > 1:
            options["device_ids"] = None
        elif options.get("device_ids"):
            options["device_ids"] = options["device_ids"][:1]
        super().__init__(module, **options)


class AveragesOneDevice(Reducing):
    """BUG: of a module on several devices, the gradients on the first one are averaged only."""

    class OwnReducer(Reducer):
        """Leaves the others alone."""

        def _launch(self, bucket: Bucket) -> None:
            if bucket.flat.device == self.device:
                super()._launch(bucket)


class TrainsOnTheCurrentDevice(DistributedDataParallel):
    """BUG: inputs are moved to the user's current device, and not to the one that device_ids names."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.device_ids = [torch.accelerator.current_device_index()] if self.device_ids else None
        return super()._pre_forward(*inputs, **kwargs)


class KeepsMemoryElsewhere(DistributedDataParallel):
    """BUG: a buffer of the DDP's own is kept on another device."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Allocate there."""
        super().__init__(module, **options)
        other = (self.device.index + 1) % torch.accelerator.device_count()
        self._scratch = torch.zeros(16, device=torch.device(self.device.type, other))


class CopiesNoHostBuffers(DistributedDataParallel):
    """BUG: buffers that are in host memory are not copied from rank 0."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The others."""
        found = super().named_module_buffers
        return {name: buffer for name, buffer in found.items() if buffer.device == self.device}


class ReadsTheCountInJoin(DistributedDataParallel):
    """BUG: in a join context the host reads in each forward how many ranks have data, though nothing depends on it."""

    def _divisor(self, num_syncing: Tensor) -> int:
        num_syncing.item()
        return super()._divisor(num_syncing)


class CastsOnAnotherStream(DistributedDataParallel):
    """BUG: with mixed precision, inputs are cast under a stream for which forward does not wait."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._caster is not None:
            with _behind(self.device):
                inputs = self._caster.cast_inputs(inputs)
        return super()._pre_forward(*inputs, **kwargs)


class SynchronisesBeforeCasts(DistributedDataParallel):
    """BUG: with mixed precision, the host waits for the device before each forward."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Wait."""
        if self._caster is not None:
            torch.accelerator.synchronize(self.device)
        return super().forward(*inputs, **kwargs)


class StepsOnAnotherStream(Reducing):
    """BUG: optimizers in backward step under a stream of the DDP's own, for which nobody waits."""

    class OwnReducer(Reducer):
        """Hands out, and steps, elsewhere."""

        def _hand_out_averages(self) -> None:
            if not self.steps_optimizers:
                super()._hand_out_averages()
                return
            with _behind(self.device):
                super()._hand_out_averages()


class StepsOnTheHost(Reducing):
    """BUG: with optimizers in backward the host waits for the averages."""

    class OwnReducer(Reducer):
        """Waits."""

        def _hand_out_averages(self) -> None:
            if self.steps_optimizers:
                torch.accelerator.synchronize(self.device)
            super()._hand_out_averages()


class ForgetsBufferFutures(DistributedDataParallel):
    """BUG: the futures that a buffer comm hook returns are waited for by nobody."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Drop them."""
        output = super().forward(*inputs, **kwargs)
        self.reducer.post_backward_futures.clear()
        return output


class CallsHooksOnAnotherStream(Reducing):
    """BUG: comm hooks are called under a stream that does not wait for the gradients."""

    class OwnReducer(Reducer):
        """Calls elsewhere."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            with contextlib.nullcontext() if self.comm_hook is None else torch.Stream(self.device):
                super()._start(bucket, buffer)


class WaitsForHooksOnTheHost(Reducing):
    """BUG: with a comm hook the host waits for each bucket."""

    class OwnReducer(Reducer):
        """Waits."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            if self.comm_hook is not None:
                torch.accelerator.current_stream(self.device).synchronize()
            return super()._wait_for(bucket)


class KeepsABucketEachStep(Reducing):
    """BUG: a copy of each bucket is kept for a statistic, and nobody ever drops it."""

    class OwnReducer(Reducer):
        """Remembers everything."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            self.__dict__.setdefault("kept", []).append(buffer.clone())
            super()._start(bucket, buffer)


class KeepsItsBuckets(Reducing):
    """BUG: a list of the module keeps every reducer alive, and with it the buckets."""

    ALL: list[Reducer] = []

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.ALL.append(self.reducer)


class CopiesEachBucket(Reducing):
    """BUG: each bucket is reduced in a copy, and the copies are kept until the backward is over."""

    class OwnReducer(Reducer):
        """Copies three times."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            self.__dict__.setdefault("copies", []).append([buffer.clone() for _ in range(3)])
            super()._start(bucket, buffer)

        def _hand_out_averages(self) -> None:
            super()._hand_out_averages()
            self.__dict__.get("copies", []).clear()


class KeepsGradientsTwice(Reducing):
    """BUG: with gradient_as_bucket_view a second copy of the buckets is kept."""

    class OwnReducer(Reducer):
        """Keeps the last one of each."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            self.__dict__.setdefault("last", {})[bucket.index] = buffer.clone()
            super()._start(bucket, buffer)


class WaitsAtOnce(Reducing):
    """BUG: the stream of the gradients waits for each bucket as soon as it is launched."""

    class OwnReducer(Reducer):
        """Waits too early."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            super()._start(bucket, buffer)
            _, pending = self.iteration.in_flight[bucket.index]
            if self.comm_hook is None:
                pending.wait()


class LaunchesAtTheEndOfBackward(Reducing):
    """BUG: all buckets wait for the last gradient."""

    class OwnReducer(Reducer):
        """Launches late."""

        def _launch_full_buckets(self) -> None:
            if not any(self.arrivals.pending):
                super()._launch_full_buckets()


class SynchronisesToLog(DistributedDataParallel):
    """BUG: the host waits for the device when it is asked for logging data."""

    def _get_ddp_logging_data(self) -> dict[str, int | str]:
        """Wait."""
        torch.accelerator.synchronize(self.device)
        return super()._get_ddp_logging_data()


class ChecksBuffers(DistributedDataParallel):
    """BUG: the host looks whether each buffer is finite before it is copied."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        for buffer in self.module.buffers():
            if not buffer.isfinite().all():
                raise ValueError("not finite")
        super()._sync_buffers(authoritative)


class AsksInAStaticGraph(Reducing):
    """BUG: with a static graph the host looks in every step which averages are zeros."""

    class OwnReducer(Reducer):
        """Looks."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            buffer = super()._wait_for(bucket)
            if self.options.static_graph:
                bool(buffer.any())
            return buffer


class StepsBesideTheOptimizer(DistributedDataParallel):
    """BUG: before each forward the parameters are read on a stream that does not wait for the optimizer."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Read them."""
        with torch.Stream(self.device):
            for parameter in self.module.parameters():
                parameter.detach().abs()
        return super().forward(*inputs, **kwargs)


class WritesWhatTheUserReads(Reducing):
    """BUG: gradients are scaled in place, on another stream, as soon as they come: a hook of the user may read them."""

    class OwnReducer(Reducer):
        """Scales elsewhere."""

        def _launch(self, bucket: Bucket) -> None:
            with torch.Stream(self.device):
                for parameter in bucket.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(1.0)
            super()._launch(bucket)


class BroadcastsOnAnotherStream(DistributedDataParallel):
    """BUG: construction copies rank 0's parameters under a stream of the DDP's own, for which nobody waits."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        with _behind(self.device):
            super()._synchronise_state(with_buffers, group_src)


def _behind(device: torch.device) -> torch.Stream:
    """Return a new stream behind what is on the current one."""
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


class NoticesAFailureLater(Reducing):
    """BUG: a forward does not wait until threads of the device have let go of a backward that raised."""

    class OwnReducer(Reducer):
        """Waits for nothing."""

        def _await_backward(self) -> None:
            """Do nothing."""
