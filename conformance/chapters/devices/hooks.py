"""Comm hooks that average, each with another use of streams; their annotations are left out, which torch compares."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from conformance.errors import present


def divides(group, bucket):  # type: ignore[no-untyped-def]
    """Sum, and divide in a callback."""
    return _sum(group, bucket.buffer()).then(lambda done: _first(done) / group.size())


def chains(group, bucket):  # type: ignore[no-untyped-def]
    """Sum, then double, then halve, then divide: each callback uses what the one before it has computed."""
    future = _sum(group, bucket.buffer())
    for step in (
        lambda done: _first(done) * 2,
        lambda done: _first(done) / 2,
        lambda done: _first(done) / group.size(),
    ):
        future = future.then(step)
    return future


def reads(group, bucket):  # type: ignore[no-untyped-def]
    """Copy the gradients on the current stream, without a wait, and return the copy's mean: another tensor."""
    return _sum(group, bucket.buffer() / group.size()).then(_first)


def completes(group, bucket):  # type: ignore[no-untyped-def]
    """Average on a stream of the hook's own, and complete a future of its own there."""
    buffer = bucket.buffer()
    here, side = torch.accelerator.current_stream(buffer.device), torch.Stream(buffer.device)
    side.wait_stream(here)
    future: Future[Tensor] = Future(devices=[buffer.device])
    with side:
        dist.all_reduce(buffer, group=group)
        buffer.div_(group.size())
        buffer.record_stream(side)
        future.set_result(buffer)
    return future


def sums_buffers(group, buffers):  # type: ignore[no-untyped-def]
    """Sum every buffer over the ranks, write it in a callback, and leave the waiting to the DDP."""
    return [_sum(group, buffer).then(lambda done: _first(done).mul_(1.0)) for buffer in buffers.values()]


HOOKS: Mapping[str, Callable[..., Any]] = {
    "divides": divides,
    "chains": chains,
    "reads": reads,
    "completes": completes,
    "fp16": default_hooks.fp16_compress_hook,
}
BUFFER_HOOKS: Mapping[str, Callable[..., Any]] = {"sums": sums_buffers}


def _sum(group: dist.ProcessGroup, tensor: Tensor) -> Future[Any]:
    future: Future[Any] = present(dist.all_reduce(tensor, group=group, async_op=True)).get_future()
    return future


def _first(done: Future[Any]) -> Tensor:
    value = done.value()
    return value if isinstance(value, Tensor) else value[0]
