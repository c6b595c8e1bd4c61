"""Mutants of chapter devices: DDPs that take a device for a CPU; `mutants.toml` names the requirements that tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conformance.mutants.bases import NothingToWaitFor, Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import Bucket
from ddp_impl.reducer import Reducer


class DropsTheWait(Reducing):
    """BUG: averages are handed out without a wait for their reduction, as if the host's order were the device's."""

    class OwnReducer(Reducer):
        """Waits for nothing."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            buffer, _ = self._in_flight[bucket.index]
            self._in_flight[bucket.index] = (buffer, NothingToWaitFor())
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
                buffer, future = self._in_flight[bucket.index]
                self._in_flight[bucket.index] = (buffer, _Taken(future))
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
