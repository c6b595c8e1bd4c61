"""The collectives that the eager part of this package issues; no other file of it calls one (`compile` builds graphs).

Those of every iteration go to the group itself, which saves tens of microseconds. Every function that takes a group
must be called by all its ranks, in the same order. Whoever waits does it by `finished` or `value_of`, which raise.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddp_impl.base.errors import CommunicationError
from ddp_impl.torch_internals.distributed import timeout_of
from ddp_impl.torch_internals.tensors import flattened, foreach_copy_, is_lazy, unflattened

#: Upper bound of one flattened broadcast, in bytes: bounds the extra memory.
BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024

#: How often, at first more often, who waits for others looks whether they will not come.
_LOOK_S = 0.05

#: What every backend sends as it is; gloo knows no int16, say, and NCCL neither.
SENT_AS_THEY_ARE = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64, torch.complex128,
    }
)  # fmt: skip


#: Sums of this process that nobody has waited for yet, in whatever group, as long as somebody may.
_under_way: dict[int, weakref.ref[dist.Work]] = {}


def finished(work: dist.Work, operation: str, outputs: Sequence[Tensor] = ()) -> None:
    """Wait for `work`, the `operation` of that name; raise unless it has succeeded. On an accelerator, queue the wait.

    Raises the error of the wait or of the future, with a note, and `CommunicationError` where the wait returns False or
    the future holds another size than `outputs`: a group in Python may keep its error in any of these places.
    """
    try:
        if work.wait() is False:
            raise CommunicationError(f"{operation} has failed: its wait returned False")
        _under_way.pop(id(work), None)
        if type(work) is not dist.Work:  # of torch's own, asking is deprecated
            _check_answers(work, operation)
        _check_future(work, operation, outputs)
    except Exception as error:
        error.add_note(f"in {operation}")
        raise


def value_of(future: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Wait for `future`, of a hook, and return what it holds; raise the error that it holds instead.

    It may be a work, which holds nothing. Raises `CommunicationError` after the group's timeout: it may never be done.
    """
    if isinstance(future, dist.Work):
        return finished(future, "what a hook has started")
    if hasattr(future, "add_done_callback") and not future.done():
        is_done, timeout_s = threading.Event(), timeout_of(group, device).total_seconds()
        future.add_done_callback(lambda _: is_done.set())
        if not is_done.wait(timeout_s):
            raise CommunicationError(
                f"the future that the hook has returned was not done after {timeout_s:g} s, the timeout of the group: "
                "the hook must set its result or its exception, whatever happens to its collectives"
            )
    return future.wait()


def _check_answers(work: dist.Work, operation: str) -> None:
    error = _answer(work, "exception")
    if isinstance(error, BaseException):
        raise error
    if error is not None or _answer(work, "is_success") is False:
        raise CommunicationError(f"{operation} has failed: {error or 'is_success() returned False'}")


def _answer(work: dist.Work, question: str) -> Any:
    """Return what `work` answers if its class answers for itself, else None: of torch's own, asking is deprecated."""
    answers = getattr(type(work), question, None)
    return None if answers in (None, getattr(dist.Work, question)) else answers(work)


def _check_future(work: dist.Work, operation: str, outputs: Sequence[Tensor]) -> None:
    if not hasattr(work, "get_future"):
        return
    try:
        future: Future[Any] = work.get_future()
    except RuntimeError as error:
        if "not implemented" in str(error):  # torch's words, of a work that has none
            return
        raise
    held = future.value() if future.done() else future.wait()
    told = [held] if isinstance(held, Tensor) else held
    # As mostly; what follows costs ten times as much.
    if type(told) is list and len(told) == len(outputs) and all(map(is_, told, outputs)):
        return
    if not isinstance(told, (list, tuple)) or not told or not all(isinstance(each, Tensor) for each in told):
        return
    if outputs and (came := _num_bytes(told)) != (expected := _num_bytes(outputs)):
        raise CommunicationError(
            f"{operation} has failed: {_amount(expected)} were expected, its future holds {_amount(came)}"
        )


def _num_bytes(tensors: Sequence[Tensor]) -> int | None:
    """Return the bytes of dense tensors, None if one is not: its values are as many as ranks have."""
    return None if any(each.is_sparse for each in tensors) else sum(each.nbytes for each in tensors)


def _amount(num_bytes: int | None) -> str:
    return "sparse tensors" if num_bytes is None else f"{num_bytes} bytes"


def _no_work(operation: str) -> RuntimeError:
    return RuntimeError(f"{operation} gave no work: this rank is not in the process group")


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> dist.Work:
    """Start summing `tensor` in place over the group; it is the sum when the returned work is `finished`.

    A sparse sum has ended when this returns, and overlaps with no other sum (docs/decisions/sparse_sums.md).
    """
    if tensor.is_sparse:
        _await([work for ref in _under_way.values() if (work := ref()) is not None])
        _under_way.clear()
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True
    # Of complex tensors, backends know the real and imaginary parts, in the same memory.
    work = group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)
    if work is None:
        raise _no_work("all_reduce")
    if tensor.is_sparse:
        _await([work])
    else:
        _under_way[id(work)] = weakref.ref(work)
    return work


def _await(works: Iterable[dist.Work]) -> None:
    """Wait for `works`. Who has started one is told of its failure when it is `finished`."""
    for work in works:
        with contextlib.suppress(Exception):
            work.wait()


def all_reduce_now(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce `tensor` in place over `group` and wait."""
    finished(all_reduce_sum(tensor, group, op), "all_reduce", [tensor])


def _broadcast_begun(tensor: Tensor, group: dist.ProcessGroup, group_src: int) -> tuple[dist.Work, Tensor]:
    sent = tensor if tensor.dtype in SENT_AS_THEY_ARE else tensor.view(-1).view(torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = group_src, True
    work = group.broadcast([torch.view_as_real(sent) if sent.is_complex() else sent], options)
    if work is None:
        raise _no_work("broadcast")
    return work, sent


def broadcast_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup, group_src: int) -> None:
    """Overwrite `tensors` (any shapes, dtypes, strides) with those of rank `group_src`, in few collectives.

    Version counters stay: a backward that saved these tensors uses the new values (pytorch/pytorch#22095).
    """
    with torch.no_grad():
        # The chunks of one round travel at the same time; there is mostly one round, of one chunk per dtype.
        for chunks in rounds_of_chunks(tensors):
            flat = [chunk[0].data if _is_flat(chunk) else _flattened(chunk) for chunk in chunks]
            for work, sent in [_broadcast_begun(each, group, group_src) for each in flat]:
                finished(work, "broadcast", [sent])
            if rank_in(group) == group_src:
                continue
            for chunk, each in zip(chunks, flat, strict=True):
                if not _is_flat(chunk):
                    foreach_copy_([tensor.data for tensor in chunk], unflattened(each, chunk))


def time_all_reduces(
    sizes_bytes: Sequence[int], group: dist.ProcessGroup, device: torch.device, num_rounds: int = 3
) -> list[tuple[int, float, float]]:
    """Return for each size (bytes, seconds of an all-reduce, seconds until its call returned), medians over rounds."""
    samples = []
    for size in sizes_bytes:
        tensor = torch.zeros(size // 4, device=device)
        seconds, launches = [], []
        for _ in range(num_rounds + 1):
            begin = time.perf_counter()
            work = all_reduce_sum(tensor, group)
            launches.append(time.perf_counter() - begin)
            finished(work, "all_reduce", [tensor])
            if device.type != "cpu":
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - begin)
        # The first one waits for ranks that are late, and may open connections.
        samples.append((size, statistics.median(seconds[1:]), statistics.median(launches[1:])))
    return samples


def stack_ranks(tensor: Tensor, group: dist.ProcessGroup, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """Return every rank's `tensor`, of one shape, stacked by rank; calls `meanwhile`, which may raise, as it waits."""
    work, gathered = _all_gather_begun(tensor, group)
    look_s = _LOOK_S / 64
    says = type(work) is dist.Work or type(work).is_completed is not dist.Work.is_completed
    while meanwhile is not None and says and not work.is_completed():
        meanwhile()
        time.sleep(look_s := min(2 * look_s, _LOOK_S))
    finished(work, "all_gather", gathered)
    return torch.stack(gathered)


def _all_gather_begun(tensor: Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, list[Tensor]]:
    gathered = [torch.empty_like(tensor) for _ in range(size_of(group))]
    work = dist.all_gather(gathered, tensor, group=group, async_op=True)
    if work is None:
        raise _no_work("all_gather")
    return work, gathered


def leave_bytes(mine: bytes, group: dist.ProcessGroup, device: torch.device) -> dist.Work:
    """Begin a `gather_bytes` of the other ranks, and do not wait for them."""
    return _all_gather_begun(_as_tensor(mine, device), group)[0]


def _as_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def gather_bytes(
    mine: bytes, group: dist.ProcessGroup, device: torch.device, meanwhile: Callable[[], None] | None = None
) -> list[bytes]:
    """Return every rank's bytes (of one length on all of them) in rank order: one small collective."""
    return [bytes(row) for row in stack_ranks(_as_tensor(mine, device), group, meanwhile).tolist()]


def gather_values(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return every rank's `value` (JSON data, small) in rank order, on every rank."""
    text = json.dumps(value).encode()
    longest = int(stack_ranks(torch.tensor([len(text)], device=device), group).max())
    return [json.loads(row) for row in gather_bytes(text.ljust(longest), group, device)]


def _is_flat(chunk: Sequence[Tensor]) -> bool:
    return len(chunk) == 1 and chunk[0].is_contiguous() and not is_lazy(chunk[0])


def _flattened(chunk: list[Tensor]) -> Tensor:
    if any(map(Tensor.is_conj, chunk)) or any(map(Tensor.is_neg, chunk)):
        chunk = [tensor.resolve_conj().resolve_neg() for tensor in chunk]
    return flattened(chunk)


def rounds_of_chunks(tensors: Iterable[Tensor]) -> Iterable[list[list[Tensor]]]:
    """Yield `tensors` in lists of one kind each, as many at a time as take no more memory than a chunk may."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled = 0
    for tensor in tensors:
        num_bytes = tensor.nbytes
        if num_bytes == 0:
            continue
        if filled and filled + num_bytes > BROADCAST_CHUNK_BYTES:
            yield list(by_kind.values())
            by_kind, filled = {}, 0
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        filled += num_bytes
    if filled:
        yield list(by_kind.values())


# What a group says of itself, also one that was built by hand. `torch.distributed.get_rank(group)` and its like look it
# up among those that `init_process_group` and `new_group` have made.


def rank_in(group: dist.ProcessGroup) -> int:
    """Return this process's rank in `group`; -1 if it is not in it (`GroupMember.NON_GROUP_MEMBER`)."""
    return group.rank() if isinstance(group, dist.ProcessGroup) else -1


def size_of(group: dist.ProcessGroup) -> int:
    """Return the number of ranks of `group`; -1 if this process is not in it."""
    return group.size() if isinstance(group, dist.ProcessGroup) else -1


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the name of the group's backend."""
    try:
        return str(dist.get_backend(group))
    except ValueError:
        return group.name()
