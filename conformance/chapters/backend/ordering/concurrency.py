"""Programs about many operations at once: in flight, in several groups, in several threads, and barriers."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.operations.calls import wait_for_device
from conformance.programs.operations.groups import Groups, members_of
from conformance.programs.operations.store_messages import Board
from conformance.programs.rank_context import RankContext

#: So long that a backend may stage it. Calls 6 and 7 of ten are: neighbours of one operation, dtype and size.
_SHORT, _LONG = 16, 20_000


def _numel(number: int) -> int:
    return _LONG if number % 10 in (6, 7) else _SHORT


def _total(ctx: RankContext, number: int, members: list[int] | None = None) -> float:
    return float(sum(100 * number + rank + 1 for rank in members or range(ctx.world_size)))


def _mine(ctx: RankContext, number: int) -> torch.Tensor:
    return torch.full((_numel(number),), float(100 * number + ctx.rank + 1), device=ctx.device)


def _check(ctx: RankContext, tensor: torch.Tensor, number: int, members: list[int] | None = None) -> str:
    """Return what is wrong with the sum of all_reduce `number`, and of which other one it is the sum."""
    expected = _total(ctx, number, members)
    wrong = tensor[tensor != expected]
    if not wrong.numel():
        return ""
    return (
        f"all_reduce {number} of {tensor.numel()} elements: {wrong.numel()} are wrong, expected {expected:g},"
        f" got {float(wrong[0]):g}{_instead(ctx, float(wrong[0]), members)}"
    )


def _instead(ctx: RankContext, got: float, members: list[int] | None) -> str:
    """Return of which all_reduces a wrong sum is made, as the end of a sentence; empty if of none."""
    size = len(members or range(ctx.world_size))
    hundreds, ones = divmod(int(got), 100)
    if ones == ctx.rank + 1 and size > 1:
        return f", which is this rank's own part of all_reduce {hundreds}"
    if got < 0 or not size <= ones <= size * ctx.world_size:  # each part is a number of hundreds, and its rank's one
        return ""
    if got == _total(ctx, hundreds // size, members):
        return f", which is the sum of all_reduce {hundreds // size}"
    return f", a sum of parts of {'' if hundreds % size else 'the wrong ranks or of '}different all_reduces"


def _unlike_tensors(what: str, tensors: list[torch.Tensor], values: list[float]) -> str:
    """Return what is wrong if each tensor does not hold its value everywhere."""
    wrong = [tensor for tensor, value in zip(tensors, values, strict=True) if bool((tensor != value).any())]
    return unlike(what, [float(tensor[-1]) for tensor in tensors], values) if wrong else ""


_MANY = (
    "100 all_reduces in flight",
    "all_reduce, broadcast and all_gather in flight",
    "all_reduce with random delays",
    "isend and irecv between all_reduces",
    "all_reduce after more messages on some ranks than on others",
)


@judged(
    "many_in_flight", always(*_MANY),
    speaks_for={_MANY[0]: ("ORD-01",), _MANY[1]: ("ORD-02",), _MANY[2]: ("ORD-07",), _MANY[3]: ("ORD-09",),
                _MANY[4]: ("ORD-09",)},
)  # fmt: skip
def many_in_flight(ctx: RankContext) -> Mapping[str, Trial]:
    """Have many operations in flight, of one kind and of several, with delays and with messages between them."""
    group, size = ctx.process_group, ctx.world_size

    def sums() -> str:
        tensors = [_mine(ctx, number) for number in range(100)]
        works: list[Any] = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        return first_wrong(*(_check(ctx, tensor, number) for number, tensor in enumerate(tensors)))

    def kinds() -> str:
        begun: list[tuple[Any, Callable[[], str]]] = []
        for number in range(30):
            tensor = _mine(ctx, number)
            if number % 3 == 0:
                work: Any = dist.all_reduce(tensor, group=group, async_op=True)
                begun.append((work, partial(_check, ctx, tensor, number)))
            elif number % 3 == 1:
                root = number % size
                work = dist.broadcast(tensor, group_src=root, group=group, async_op=True)
                begun.append((work, partial(_unlike_tensors, "broadcast gave", [tensor], [100.0 * number + root + 1])))
            else:
                slots = [torch.zeros_like(tensor) for _ in range(size)]
                work = dist.all_gather(slots, tensor, group=group, async_op=True)
                firsts = [100.0 * number + rank + 1 for rank in range(size)]
                begun.append((work, partial(_unlike_tensors, "all_gather gave", slots, firsts)))
        for work, _ in begun:
            work.wait()
        return first_wrong(*(check() for _, check in begun))

    def delayed() -> str:
        rng, clauses = random.Random(ctx.rank), []
        for number in range(15):
            time.sleep(rng.random() * 0.004)
            tensor = _mine(ctx, number)
            dist.all_reduce(tensor, group=group)
            clauses.append(_check(ctx, tensor, number))
        return first_wrong(*clauses)

    def between() -> str:
        following, previous, clauses = (ctx.rank + 1) % size, (ctx.rank - 1) % size, []
        for number in range(10):
            tensor, room = _mine(ctx, number), torch.zeros(_numel(number), device=ctx.device)
            work: Any = dist.all_reduce(tensor, group=group, async_op=True)
            if ctx.rank < 2:  # these two alone exchange messages
                peer, message = 1 - ctx.rank, _mine(ctx, number)
                pair: list[Any] = [
                    dist.isend(message, group=group, group_dst=peer),
                    dist.irecv(room, group=group, group_src=peer),
                ]
                for one in pair:
                    one.wait()
                clauses.append(unlike("the message is", float(room[0]), 100.0 * number + peer + 1))
            work.wait()
            clauses.append(_check(ctx, tensor, number))
        assert following != previous or size == 2  # noqa: S101 - our own mistake
        return first_wrong(*clauses)

    def unlike_numbers() -> str:
        clauses = []
        # So that the ranks' numbers of messages differ by one and by two, also between the two of a message.
        for number, (source, target) in enumerate([(0, 1), (size - 1, 0), (0, 1), (0, 1), (1, size - 1)]):
            room = torch.zeros(_numel(number), device=ctx.device)
            if source != target and ctx.rank == source:
                dist.send(_mine(ctx, number), group=group, group_dst=target)
            elif source != target and ctx.rank == target:
                dist.recv(room, group=group, group_src=source)
                clauses.append(unlike("the message is", float(room[0]), 100.0 * number + source + 1))
            tensor, slots = _mine(ctx, number), [torch.zeros_like(room) for _ in range(size)]
            dist.all_reduce(tensor, group=group)
            dist.all_gather(slots, _mine(ctx, number), group=group)
            dist.broadcast(room.copy_(_mine(ctx, number)), group_src=1, group=group)
            clauses.append(_check(ctx, tensor, number))
            firsts = [100.0 * number + rank + 1 for rank in range(size)]
            clauses.append(_unlike_tensors("all_gather gave", slots, firsts))
            clauses.append(_unlike_tensors("broadcast gave", [room], firsts[1:2]))
        return first_wrong(*clauses)

    return dict(zip(_MANY, (sums, kinds, delayed, between, unlike_numbers), strict=True))


OWN_ORDER = "all_reduce in two groups, in another order on each rank"
RING = "all_reduce in groups in a ring"
THREADS = "all_reduce in two threads with a group each"
_GROUPS = (OWN_ORDER, RING, THREADS)


@judged(
    "several_groups", always(*_GROUPS),
    speaks_for={OWN_ORDER: ("ORD-03",), RING: ("ORD-04",), THREADS: ("ORD-05",)},
)  # fmt: skip
def several_groups(ctx: RankContext) -> Mapping[str, Trial]:
    """Sum in several groups at once, in the order of each rank's own."""
    size = ctx.world_size

    def own_order() -> str:
        groups = [dist.new_group() for _ in range(2)]
        begun = []
        for turn in range(5):
            for which in (0, 1) if (ctx.rank + turn) % 2 else (1, 0):
                tensor = _mine(ctx, 2 * turn + which)
                begun.append((dist.all_reduce(tensor, group=groups[which], async_op=True), tensor, 2 * turn + which))
        clauses = []
        for work, tensor, number in begun:
            work.wait()
            clauses.append(_check(ctx, tensor, number))
        return first_wrong(*clauses)

    def ring() -> str:
        pairs = [sorted({rank, (rank + 1) % size}) for rank in range(size)]
        groups = [dist.new_group(pair) for pair in pairs]
        clauses = []
        for turn in range(3):
            begun = [
                (dist.all_reduce(tensor, group=groups[number], async_op=True), tensor, number)
                for number in range(size)
                if ctx.rank in pairs[number]
                for tensor in [_mine(ctx, number + turn)]
            ]
            for work, tensor, number in begun:
                work.wait()
                clauses.append(_check(ctx, tensor, number + turn, pairs[number]))
        return first_wrong(*clauses)

    def threads() -> str:
        groups, clauses = [dist.new_group() for _ in range(2)], [""]

        def work(which: int) -> None:
            try:
                for number in range(20):
                    tensor = _mine(ctx, number + which)
                    dist.all_reduce(tensor, group=groups[which])
                    clauses.append(_check(ctx, tensor, number + which))
            except Exception as error:
                clauses.append(f"a thread raised {type(error).__name__}: {error}")

        running = [threading.Thread(target=work, args=(which,)) for which in range(2)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return first_wrong(*clauses)

    return dict(zip(_GROUPS, (own_order, ring, threads), strict=True))


_OF_GROUPS = ("permuted", "without-0", "ends")
_BARRIERS = (
    "barrier", "asynchronous barrier", "barrier of the group's method", "the future of an asynchronous barrier",
    "barrier in another thread", "barrier behind an all_reduce that is under way",
    "barrier, each rank late in turn", *(f"barrier of group {name}, each rank late in turn" for name in _OF_GROUPS),
)  # fmt: skip
_PATIENCE, _SHORT_PATIENCE = timedelta(seconds=0.3), timedelta(seconds=0.1)


@judged("barriers", always(*_BARRIERS))
def barriers(ctx: RankContext) -> Mapping[str, Trial]:
    """Enter barriers, a rank late; look whether nobody leaves before."""
    group, everybody = ctx.process_group, range(ctx.world_size)

    def held(
        enter: Callable[[], Any], of: str = "world", late: int = everybody[-1], waits: timedelta = _PATIENCE
    ) -> str:
        board = Board(f"barrier of {of}")
        others = [rank for rank in members_of(of, ctx.rank, ctx.world_size) if rank != late]
        if ctx.rank == late:
            held_back = board.lacking([f"left/{rank}" for rank in others], waits)
            board.put("came")
            enter()
            early = [rank for rank in others if f"left/{rank}" not in held_back]
            return f"rank {early[0]} left the barrier before rank {late} had come" if early else ""
        enter()
        wrong = "" if board.has("came") else f"left the barrier before rank {late} had come"
        board.put(f"left/{ctx.rank}")
        return wrong

    def each_late(of: str) -> str:
        groups = Groups(group, ctx.rank, ctx.world_size, ctx.device)
        made, members = groups.get(of), members_of(of, ctx.rank, ctx.world_size)
        late = members if ctx.rank in members else ()
        clauses = [held(lambda: dist.barrier(group=made), of, rank, _SHORT_PATIENCE) for rank in late]
        groups.destroy()
        return first_wrong(*clauses)

    def begun() -> Any:
        return dist.barrier(group=group, async_op=True)

    def by_its_future() -> None:
        begun().get_future().wait()
        wait_for_device()  # of which a future orders the stream, and does not hold the host

    def in_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(dist.barrier, group=group).result()

    def behind_a_sum() -> None:
        under_way: Any = dist.all_reduce(torch.ones(3, device=ctx.device), group=group, async_op=True)
        dist.barrier(group=group)
        under_way.wait()

    return {
        _BARRIERS[0]: lambda: held(lambda: dist.barrier(group=group)),
        _BARRIERS[1]: lambda: held(lambda: begun().wait()),
        _BARRIERS[2]: lambda: held(lambda: group.barrier().wait()),
        _BARRIERS[3]: lambda: held(by_its_future),
        _BARRIERS[4]: lambda: held(in_thread),
        _BARRIERS[5]: lambda: held(behind_a_sum),
        **{name: partial(each_late, of) for name, of in zip(_BARRIERS[6:], ("world", *_OF_GROUPS), strict=True)},
    }
