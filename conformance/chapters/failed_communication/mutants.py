"""Mutants of chapter failed_communication: DDPs with one bug each; `mutants.toml` says which requirements detect it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel, collectives
from ddp_impl.bucket import Bucket, GradBucket
from ddp_impl.groups import size_of
from ddp_impl.parameter_usage import ParameterUsage
from ddp_impl.reducer import Reducer


def _wait_only(work: Any, *_: Any) -> None:
    work.wait()


@contextlib.contextmanager
def _believing(finished: Callable[..., None] = _wait_only) -> Iterator[None]:
    """Let `finished` stand for the door through which everybody goes who waits for a collective."""
    with mock.patch.object(collectives, "finished", finished):
        yield


class WaitsForBucketsOnly(Reducing):
    """BUG: a bucket is taken for an average as soon as the wait for it has returned, whatever else its work says."""

    class OwnReducer(Reducer):
        """Waits."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            with _believing():
                return super()._wait_for(bucket)


class SwallowsFailedWaits(Reducing):
    """BUG: what the wait for a bucket raises is swallowed, and this rank's own gradients stay."""

    class OwnReducer(Reducer):
        """Waits, and goes on in any case."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            def waited(work: Any, *_: Any) -> None:
                with contextlib.suppress(Exception):
                    work.wait()

            with _believing(waited):
                return super()._wait_for(bucket)


class ReadsNoHooksFuture(Reducing):
    """BUG: where a hook's future holds an error, the bucket that the hook was given is taken for its result."""

    class OwnReducer(Reducer):
        """Takes what is there."""

        def _wait_for(self, bucket: Bucket) -> Tensor:
            buffer, _ = self.iteration.in_flight[bucket.index]

            def value_of(future: Any) -> Any:
                with contextlib.suppress(Exception):
                    return future.wait()
                return buffer

            with mock.patch.object(collectives, "value_of", value_of):
                return super()._wait_for(bucket)


class BuiltInHookForgetsItsWork(DistributedDataParallel):
    """BUG: the built-in hook goes on when the future of its collective is complete, and never reads it."""

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        super()._register_builtin_comm_hook(comm_hook_type)
        group = self.process_group

        def hook(bucket: GradBucket) -> Any:
            buffer = bucket.buffer()
            compressed = buffer.to(torch.float16).div_(size_of(group))
            work = collectives.all_reduce_sum(compressed, group)
            return work.get_future().then(lambda _: buffer.copy_(compressed))

        self.reducer.comm_hook = hook


class CountsUsersBlindly(Reducing):
    """BUG: ranks that did not hear which parameters others used go by what they used themselves."""

    class OwnUsage(ParameterUsage):
        """Waits."""

        def end_agreeing(self) -> None:
            """Take the flags for those of all ranks."""
            with _believing():
                super().end_agreeing()


class CopiesBuffersBlindly(DistributedDataParallel):
    """BUG: buffers are taken for rank 0's as soon as the wait for them has returned."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        with _believing():
            super()._sync_buffers(authoritative)


class ConstructsBlindly(DistributedDataParallel):
    """BUG: at construction, parameters are taken for rank 0's as soon as the wait for them has returned."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        with _believing():
            super()._synchronise_state(with_buffers, group_src)


class DropsErrorsOfBufferFutures(Reducing):
    """BUG: errors in the futures of a buffer hook are dropped."""

    class OwnReducer(Reducer):
        """Waits for futures, and reads none."""

        def _hand_out_averages(self) -> None:
            for future in self.post_backward_futures:
                with contextlib.suppress(Exception):
                    future.wait()
            self.post_backward_futures.clear()
            super()._hand_out_averages()


class NormalisesBlindly(DistributedDataParallel):
    """BUG: the statistics of a synchronised normalisation are this rank's own where the others' did not come."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with _believing():
            return super()._run_ddp_forward(*inputs, **kwargs)


class GoesOnAfterAFailure(Reducing):
    """BUG: when a collective has failed, the next forward goes on as if nothing had happened."""

    class OwnReducer(Reducer):
        """Forgets."""

        def check_finished(self) -> None:
            """Look at the state alone."""
            self.peers.lost = ""
            super().check_finished()


class NamesNoBucket(Reducing):
    """BUG: the error of a bucket that was not reduced does not say which parameters are in it."""

    class OwnReducer(Reducer):
        """Says that it was one."""

        def _called(self, bucket: Bucket) -> str:
            return "a bucket"
