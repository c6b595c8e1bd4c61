"""Programs about what groups and operations leave behind: threads, descriptors, memory."""

import gc
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.programs.held import handles, resident_bytes
from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.operations.calls import wait_for_device
from conformance.programs.operations.groups import Groups, members_of
from conformance.programs.operations.store_messages import Board
from conformance.programs.rank_context import RankContext
from conformance.waiting.kept_waiting import process_seconds

#: So many groups of each kind; those of all ranks come last.
_NUM_GROUPS, _NUM_OPERATIONS = 6, 500
_KINDS = ("without-0", "ends", "alone", "twin")
#: 32 KiB, which backends treat as short; `kept_memory` has the long ones.
_NUMEL = 8000
#: So many descriptors, and threads, may ten times as many operations leave.
_MOST_LEFT = 10
#: So many the groups of a kind may leave.
_MOST_OF_GROUPS = 3
#: Threads and descriptors of a destroyed group have so long to go, where the machine lets them.
_PATIENCE_S = 2.0
_OF_GROUPS = tuple(f"descriptors and threads of destroyed groups called {kind}" for kind in _KINDS)
_NAMES = ("descriptors and threads of all_reduces", "memory of all_reduces")


@judged(
    "leaks", always(*_OF_GROUPS, *_NAMES),
    speaks_for={"*of destroyed groups*": ("LIFE-05",), "*of all_reduces": ("LIFE-06",)},
)  # fmt: skip
def leaks(ctx: RankContext) -> Mapping[str, Trial]:
    """Make and destroy groups, and call many operations; count what is left."""

    def make_groups(name: str) -> None:
        for _ in range(_NUM_GROUPS):
            groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device)
            group = groups.get(name)
            if ctx.rank in members_of(name, ctx.rank, ctx.world_size):
                use(group)
            groups.destroy()

    def use(group: Any) -> None:
        rank, size, tensor = group.rank(), group.size(), torch.ones(1, device=ctx.device)
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, group=group, group_src=0)
        dist.all_gather([torch.empty_like(tensor) for _ in range(size)], tensor, group=group)
        if "send_recv" in ctx.declared and size > 1:
            sending: Any = dist.isend(tensor, group=group, group_dst=(rank + 1) % size)
            dist.recv(torch.empty_like(tensor), group=group, group_src=(rank - 1) % size)
            sending.wait()
        dist.barrier(group=group)

    def operate(number: int = _NUM_OPERATIONS) -> None:
        for _ in range(number):
            work: Any = dist.all_reduce(torch.ones(_NUMEL, device=ctx.device), group=ctx.process_group, async_op=True)
            work.wait()
            wait_for_device()  # which may keep memory until the host does

    def left(act: Callable[[], None], most: int) -> str:
        act()
        before = handles()
        act()
        for _ in process_seconds(_PATIENCE_S, pause_s=0.05):
            gc.collect()
            more = {name: number - before[name] for name, number in handles().items()}
            if max(more.values()) <= most:
                return ""
        return f"{more['descriptors']} more descriptors and {more['threads']} more threads than the time before"

    def memory() -> str:
        operate()
        before = resident_bytes()
        operate()
        grown = resident_bytes() - before
        most = _NUM_OPERATIONS * _NUMEL  # a quarter of what the tensors had together
        return "" if grown < most else f"the process has grown by {grown} bytes in {_NUM_OPERATIONS} operations"

    of_groups = [partial(left, partial(make_groups, kind), _MOST_OF_GROUPS) for kind in _KINDS]
    return {
        **dict(zip(_OF_GROUPS, of_groups, strict=True)),
        _NAMES[0]: lambda: left(lambda: operate(10 * _MOST_LEFT), _MOST_LEFT), _NAMES[1]: memory,
    }  # fmt: skip


_LEFT_BEHIND = (5, 20_000)
_LEAVER = tuple(f"a message of {numel} elements of a rank that then destroys its group" for numel in _LEFT_BEHIND)
#: So long the receiver waits for the sender to leave, who may wait for the receiver.
_LEAVES = timedelta(seconds=0.3)


@judged("message_of_a_leaver", always(*_LEAVER))
def message_of_a_leaver(ctx: RankContext) -> Mapping[str, Trial]:
    """Send from rank 0, which waits for that and destroys the group, to rank 1, which receives late."""

    def left(numel: int) -> str:
        board, group = Board("leaver"), dist.new_group()
        wrong, values = "", torch.arange(numel, dtype=torch.float32, device=ctx.device)
        dist.all_reduce(values.clone(), group=group)
        if ctx.rank == 0:
            dist.send(values, group=group, group_dst=1)
        elif ctx.rank == 1:
            board.lacking(["left"], _LEAVES)
            room = torch.full_like(values, -1.0)
            dist.recv(room, group=group, group_src=0)
            wrong = "" if torch.equal(room, values) else f"{int((room != values).sum())} of {numel} elements are wrong"
        dist.destroy_process_group(group)
        board.put("left")
        return wrong

    return {name: partial(left, numel) for name, numel in zip(_LEAVER, _LEFT_BEHIND, strict=True)}


_ENDS = (
    "destroy_process_group by ranks at different times", "destroy_process_group with Works pending", "shutdown twice",
    "destroy_process_group after a Work whose future alone was waited for",
)  # fmt: skip


@judged(
    "ends_of_groups", always(*_ENDS),
    speaks_for={_ENDS[0]: ("LIFE-02",), _ENDS[1]: ("LIFE-04",), _ENDS[2]: ("LIFE-09",), _ENDS[3]: ("LIFE-04",)},
)  # fmt: skip
def ends_of_groups(ctx: RankContext) -> Mapping[str, Trial]:
    """Destroy groups at different times, with Works pending, and shut one down twice."""

    def sum_of(group: Any) -> str:
        tensor = torch.ones(3, device=ctx.device)
        dist.all_reduce(tensor, group=group)
        return unlike("the sum of all_reduce is", tensor, [float(ctx.world_size)] * 3)

    def apart() -> str:
        group = dist.new_group()
        clauses = [sum_of(group)]
        if ctx.rank == 0:  # the others need it elsewhere before they destroy theirs
            dist.destroy_process_group(group)
        clauses.append(sum_of(ctx.process_group))
        if ctx.rank > 0:
            time.sleep(0.1 * (ctx.rank - 1))
            dist.destroy_process_group(group)
        return first_wrong(*clauses, sum_of(ctx.process_group))

    def pending() -> str:
        group = dist.new_group()
        works = [dist.all_reduce(torch.ones(1000, device=ctx.device), group=group, async_op=True) for _ in range(5)]
        for work in works:
            work.wait()
        wait_for_device()
        held = works[-1]
        dist.destroy_process_group(group)
        return first_wrong(unlike("is_completed() of a Work kept is", held.is_completed(), True),
                           sum_of(ctx.process_group))  # fmt: skip

    def asked() -> str:
        group = dist.new_group()
        work: Any = dist.all_reduce(torch.ones(1000, device=ctx.device), group=group, async_op=True)
        future = work.get_future()
        if future is not None:
            future.wait()
        wait_for_device()
        dist.destroy_process_group(group)
        return sum_of(ctx.process_group)

    def twice() -> str:
        group: Any = dist.new_group()
        clause = sum_of(group)
        group.shutdown()
        group.shutdown()
        dist.destroy_process_group(group)
        return first_wrong(clause, sum_of(ctx.process_group))

    return dict(zip(_ENDS, (apart, pending, twice, asked), strict=True))
