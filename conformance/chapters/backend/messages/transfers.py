"""Programs about messages from rank to rank: their order, tags, senders, and batches of them."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.chapters.backend.messages.message import (
    NUM_MESSAGES,
    first_of,
    irecv,
    isend,
    message,
    numel_of,
    peers,
    room_for,
    wrong_message,
)
from conformance.programs.judged import Trial, always, judged
from conformance.programs.operations.groups import Groups
from conformance.programs.operations.store_messages import Board
from conformance.programs.rank_context import RankContext

_SIZES = (1, 7, 1009, 65_537)
_NUM_IN_ORDER, _EMPTY = 8, 5
#: So long that backends ask the receiver before they send it.
_STAGED = 30_000
#: 4 MB.
_LONG = 1_000_000
_PATIENCE = timedelta(seconds=3)


_PAIRS = tuple(f"isend and irecv of all pairs at once, {numel} element{'s' * (numel > 1)}" for numel in _SIZES)


@judged("all_pairs", always(*_PAIRS))
def all_pairs(ctx: RankContext) -> Mapping[str, Trial]:
    """Send from every rank to every other at once, in several sizes."""

    def exchange(numel: int) -> str:
        sent = [message(ctx, ctx.rank, peer, 0, numel) for peer in peers(ctx)]
        rooms = [room_for(ctx, numel) for _ in peers(ctx)]
        works = [isend(ctx, tensor, peer) for tensor, peer in zip(sent, peers(ctx), strict=True)]
        works += [irecv(ctx, room, peer) for room, peer in zip(rooms, peers(ctx), strict=True)]
        for work in works:
            work.wait()
        return first_of(wrong_message(ctx, room, peer) for room, peer in zip(rooms, peers(ctx), strict=True))

    return {name: partial(exchange, numel) for name, numel in zip(_PAIRS, _SIZES, strict=True)}


_ORDER = ("isends to one rank arrive in order", "a wait for the last irecv first", "send and recv in a chain")


@judged("order_of_messages", always(*_ORDER), speaks_for={_ORDER[1]: ("P2P-10",)})
def order_of_messages(ctx: RankContext) -> Mapping[str, Trial]:
    """Send several messages to the next rank; wait for them in either order; pass one round by send and recv."""
    following, previous = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size

    def several(*, backwards: bool) -> str:
        # Waited for in their order every other one is long: a short one may not overtake it. One is of no elements.
        sizes = [numel_of(ctx) if backwards or number % 2 else _STAGED for number in range(_NUM_IN_ORDER)]
        sizes[_EMPTY] = 0
        sent = [message(ctx, ctx.rank, following, number, numel) for number, numel in enumerate(sizes)]
        rooms = [room_for(ctx, numel) for numel in sizes]
        works = [isend(ctx, tensor, following) for tensor in sent] + [irecv(ctx, room, previous) for room in rooms]
        for work in reversed(works) if backwards else works:
            work.wait()
        return first_of(wrong_message(ctx, room, previous, number) for number, room in enumerate(rooms))

    def chain() -> str:
        room = room_for(ctx)
        if ctx.rank > 0:
            dist.recv(room, group=ctx.process_group, group_src=previous)
        if ctx.rank < ctx.world_size - 1:
            dist.send(message(ctx, ctx.rank, following), group=ctx.process_group, group_dst=following)
        return wrong_message(ctx, room, previous) if ctx.rank > 0 else ""

    return {
        _ORDER[0]: lambda: several(backwards=False), _ORDER[1]: lambda: several(backwards=True), _ORDER[2]: chain,
    }  # fmt: skip


_OF_TAGS = (3, 3 + 2**8, 3 + 2**9, 3 + 2**16)
_TAGS = (f"irecv of the tags {', '.join(map(str, _OF_TAGS))} in reverse order",)


@judged("tagged_messages", always(*_TAGS))
def tagged_messages(ctx: RankContext) -> Mapping[str, Trial]:
    """Send messages with tags to all other ranks, which call irecv before, in the reverse order of tags and of ranks.

    The low 8 bits of the tags are alike, and the low 16 bits of two.
    """
    others = [rank for rank in range(ctx.world_size) if rank != ctx.rank]
    each = [(rank, number) for rank in others for number in range(len(_OF_TAGS))]

    def reverse() -> str:
        rooms = {one: room_for(ctx) for one in each}
        works = [irecv(ctx, rooms[rank, number], rank, _OF_TAGS[number]) for rank, number in reversed(each)]
        messages = {(rank, number): message(ctx, ctx.rank, rank, number) for rank, number in each}
        works += [isend(ctx, messages[rank, number], rank, _OF_TAGS[number]) for rank, number in each]
        for work in works:
            work.wait()
        return first_of(wrong_message(ctx, rooms[rank, number], rank, number) for rank, number in each)

    return {_TAGS[0]: reverse}


_SELF = ("isend and irecv to oneself", "send to oneself")


@judged("messages_to_oneself", always(*_SELF))
def messages_to_oneself(ctx: RankContext) -> Mapping[str, Trial]:
    """Send to oneself: isend and irecv work or raise, send raises; nothing hangs or dies.

    In a group of its own: a message that was sent and not received may be taken for a later one.
    """

    def asynchronous(group: Any) -> str:
        room = room_for(ctx)
        works: list[Any] = [
            dist.isend(message(ctx, ctx.rank, ctx.rank), group=group, group_dst=ctx.rank),
            dist.irecv(room, group=group, group_src=ctx.rank),
        ]
        for work in works:
            work.wait()
        return wrong_message(ctx, room, ctx.rank)

    def synchronous(group: Any) -> str:
        dist.send(message(ctx, ctx.rank, ctx.rank), group=group, group_dst=ctx.rank)
        return "raised nothing"

    def apart(trial: Callable[[Any], str]) -> str:
        groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device)
        group = groups.get("twin")
        try:
            return trial(group)
        except Exception:
            return ""
        finally:
            groups.destroy()

    return {_SELF[0]: partial(apart, asynchronous), _SELF[1]: partial(apart, synchronous)}


_WAITING = (
    "isend comes back before irecv is called", "isend first on both sides", "irecv first on both sides",
    f"{NUM_MESSAGES} isends come back before irecv is called",
    f"isend of {_LONG:,} elements comes back before irecv is called",
)  # fmt: skip


@judged("who_waits_for_whom", always(*_WAITING), speaks_for={"*is called": ("P2P-06",), "*on both sides": ("P2P-07",)})
def who_waits_for_whom(ctx: RankContext) -> Mapping[str, Trial]:
    """Send to a rank that has not called irecv yet; exchange with a neighbour in either order."""
    size = ctx.world_size
    following, previous = (ctx.rank + 1) % size, (ctx.rank - 1) % size

    def early(number: int, numel: int | None = None) -> str:
        board, wrong = Board(f"isend of {number}, {numel}"), ""
        sent = [message(ctx, ctx.rank, following, turn, numel) for turn in range(number)]
        works = [isend(ctx, one, following) for one in sent]
        board.put(f"sent/{ctx.rank}")
        if board.lacking([f"sent/{rank}" for rank in range(size)], _PATIENCE):
            wrong = "some rank's isend did not come back before its peer's irecv"
        rooms = [room_for(ctx, numel) for _ in works]
        for work in [*(irecv(ctx, room, previous) for room in rooms), *works]:
            work.wait()
        return wrong or first_of(wrong_message(ctx, room, previous, turn) for turn, room in enumerate(rooms))

    def exchange(*, receives_first: bool) -> str:
        room = room_for(ctx)
        calls = [
            lambda: isend(ctx, message(ctx, ctx.rank, following), following), lambda: irecv(ctx, room, previous)
        ]  # fmt: skip
        works = [call() for call in (reversed(calls) if receives_first else calls)]
        for work in works:
            work.wait()
        return wrong_message(ctx, room, previous)

    return {
        _WAITING[0]: partial(early, 1),
        _WAITING[1]: lambda: exchange(receives_first=False),
        _WAITING[2]: lambda: exchange(receives_first=True),
        _WAITING[3]: partial(early, NUM_MESSAGES),
        _WAITING[4]: partial(early, 1, _LONG),
    }


_BATCHES = (
    "batch_isend_irecv of sends, then receives",
    "batch_isend_irecv of receives, then sends",
    "batch_isend_irecv of sends only and of receives only",
    "batch_isend_irecv of a single operation",
    "batch_isend_irecv among some ranks only",
)


@judged("batches", always(*_BATCHES), speaks_for={_BATCHES[4]: ("P2P-09",)})
def batches(ctx: RankContext) -> Mapping[str, Trial]:
    """Exchange messages by `batch_isend_irecv`: in either order, one-sided, single, and among some ranks."""
    group, size = ctx.process_group, ctx.world_size
    following, previous = (ctx.rank + 1) % size, (ctx.rank - 1) % size

    def send(target: int) -> Any:
        return dist.P2POp(dist.isend, message(ctx, ctx.rank, target), group=group, group_peer=target)

    def receive(room: Tensor, source: int) -> Any:
        return dist.P2POp(dist.irecv, room, group=group, group_peer=source)

    def run(operations: list[Any]) -> None:
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def ring(*, receives_first: bool) -> str:
        room = room_for(ctx)
        operations = [send(following), receive(room, previous)]
        run(operations[::-1] if receives_first else operations)
        return wrong_message(ctx, room, previous)

    def one_sided() -> str:
        rooms = [room_for(ctx) for _ in range(3)]
        if ctx.rank == 0:
            run([send(1) for _ in range(3)])
        elif ctx.rank == 1:
            run([receive(room, 0) for room in rooms])
            return first_of(wrong_message(ctx, room, 0) for room in rooms)
        return ""

    def single() -> str:
        room = room_for(ctx)
        if ctx.rank == 0:
            run([send(1)])
        elif ctx.rank == 1:
            run([receive(room, 0)])
            return wrong_message(ctx, room, 0)
        return ""

    def some() -> str:
        dist.barrier(group=group)
        if ctx.rank > 1:
            return ""
        room, peer = room_for(ctx), 1 - ctx.rank
        run([send(peer), receive(room, peer)])
        return wrong_message(ctx, room, peer)

    return dict(
        zip(
            _BATCHES,
            (lambda: ring(receives_first=False), lambda: ring(receives_first=True), one_sided, single, some),
            strict=True,
        )
    )


_BESIDE = (
    "is_completed() of an irecv while other operations of its group come and go",
    "messages in two groups of the same ranks",
    "irecvs under way in two groups of the same ranks",
)


@judged("messages_beside", always(*_BESIDE))
def messages_beside(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask a receive whether it is done before its message is sent; send in two groups of the same ranks."""
    following, previous = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size

    def asked() -> str:
        board, room = Board("asked"), room_for(ctx)
        receipt = irecv(ctx, room, previous)
        dist.all_reduce(room_for(ctx), group=ctx.process_group)
        dist.barrier(group=ctx.process_group)
        wrong = "it is True before the message was sent" if receipt.is_completed() else ""
        board.put(f"asked/{ctx.rank}")
        board.lacking([f"asked/{following}"], _PATIENCE)  # which must not have its message before it has asked
        sending = isend(ctx, message(ctx, ctx.rank, following), following)
        for work in (sending, receipt):
            work.wait()
        return wrong or wrong_message(ctx, room, previous)

    def in_two_groups(receive: Callable[..., Any]) -> str:
        groups = [dist.new_group() for _ in range(2)]
        sent = [message(ctx, ctx.rank, following, number) for number in range(2)]
        rooms = [room_for(ctx) for _ in groups]
        works: list[Any] = [
            dist.isend(one, group=group, group_dst=following) for one, group in zip(sent, groups, strict=True)
        ]
        received = [receive(rooms[number], group=groups[number], group_src=previous) for number in (1, 0)]
        for work in works + [one for one in received if isinstance(one, dist.Work)]:
            work.wait()
        for group in groups:
            dist.destroy_process_group(group)
        return first_of(wrong_message(ctx, room, previous, number) for number, room in enumerate(rooms))

    trials = (asked, partial(in_two_groups, dist.recv), partial(in_two_groups, dist.irecv))
    return dict(zip(_BESIDE, trials, strict=True))
