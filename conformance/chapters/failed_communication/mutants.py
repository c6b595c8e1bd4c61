"""Mutants of chapter failed_communication: DDPs with one bug each; `mutants.toml` says which requirements detect it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.buckets.bucket import Bucket, GradBucket
from ddp_impl.buckets.comm_hooks import BoundHook
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.wire import collectives
from ddp_impl.wire.collectives import size_of


def _wait_only(work: Any, *_: Any) -> None:
    work.wait()


@contextlib.contextmanager
def _believing(finished: Callable[..., None] = _wait_only) -> Iterator[None]:
    """Let `finished` stand for the function that every wait for a collective calls."""
    with mock.patch.object(collectives, "finished", finished):
        yield


@replaces(Reduction, "wait")
def WaitsForBucketsOnly(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: a bucket is taken for an average as soon as the wait for it has returned, whatever else its work says."""
    with _believing():
        return wait_for(bucket)


@replaces(Reduction, "wait")
def SwallowsFailedWaits(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: what the wait for a bucket raises is swallowed, and this rank's own gradients stay."""

    def waited(work: Any, *_: Any) -> None:
        with contextlib.suppress(Exception):
            work.wait()

    with _believing(waited):
        return wait_for(bucket)


@replaces(Reduction, "wait")
def ReadsNoHooksFuture(reduction: Reduction, wait_for: Call, bucket: Bucket) -> Any:
    """BUG: where a hook's future holds an error, the bucket that the hook was given is taken for its result."""
    buffer, _ = reduction.iteration.in_flight[bucket.index]

    def value_of(future: Any, *_: Any) -> Any:
        with contextlib.suppress(Exception):
            return future.wait()
        return buffer

    with mock.patch.object(collectives, "value_of", value_of):
        return wait_for(bucket)


@replaces(Ours, "_register_builtin_comm_hook")
def BuiltInHookForgetsItsWork(ddp: Ours, register_builtin_comm_hook: Call, comm_hook_type: Any) -> None:
    """BUG: the built-in hook continues when the future of its collective is complete, and never reads it."""
    register_builtin_comm_hook(comm_hook_type)
    group = ddp.process_group

    def hook(bucket: GradBucket) -> Any:
        buffer = bucket.buffer()
        compressed = buffer.to(torch.float16).div_(size_of(group))
        work = collectives.all_reduce_sum(compressed, group)
        return work.get_future().then(lambda _: buffer.copy_(compressed))

    ddp.reducer.reduction.comm_hook = BoundHook(hook)


@replaces(Reduction, "read_usage")
def CountsUsersBlindly(reduction: Reduction, read_usage: Call) -> Any:
    """BUG: ranks that did not receive which parameters others used go by their own use."""
    with _believing():
        return read_usage()


@replaces(Ours, "_sync_buffers")
def CopiesBuffersBlindly(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: buffers are taken for rank 0's as soon as the wait for them has returned."""
    with _believing():
        sync_buffers(authoritative)


@replaces(Ours, "synchronise_state")
def ConstructsBlindly(ddp: Ours, synchronise_state: Call, with_buffers: bool, group_src: int = 0) -> None:
    """BUG: at construction, parameters are taken for rank 0's as soon as the wait for them has returned."""
    with _believing():
        synchronise_state(with_buffers, group_src)


@replaces(Reduction, "finalize_buckets")
def DropsErrorsOfBufferFutures(reduction: Reduction, hand_out_averages: Call) -> None:
    """BUG: errors in the futures of a buffer hook are dropped."""
    for future in reduction.post_backward_futures:
        with contextlib.suppress(Exception):
            future.wait()
    reduction.post_backward_futures.clear()
    hand_out_averages()


@replaces(Ours, "_run_ddp_forward")
def NormalisesBlindly(ddp: Ours, run_ddp_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the statistics of a synchronised normalisation are this rank's own where the others' did not arrive."""
    with _believing():
        return run_ddp_forward(*inputs, **kwargs)


@replaces(Reducer, "check_finished")
def GoesOnAfterAFailure(reducer: Reducer, check_finished: Call) -> None:
    """BUG: when a collective has failed, the next forward continues as if nothing had happened."""
    reducer.peers.lost = ""
    check_finished()


@replaces(Reduction, "in_words")
def NamesNoBucket(reduction: Reduction, called: Call, bucket: Bucket) -> str:
    """BUG: the error of a bucket that was not reduced does not say which parameters are in it."""
    return "a bucket"
