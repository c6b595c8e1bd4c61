"""Programs about messages that a rank receives from whoever sends."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.chapters.backend.messages.message import (
    irecv,
    isend,
    message,
    peers,
    room_for,
    wrong_message,
)
from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.operations.store_messages import Board
from conformance.programs.rank_context import RankContext

_DTYPES = (torch.float64, torch.int64, torch.int32)
#: So many messages come from each sender.
_NUM_OF_EACH = 3
#: So long a receive is left alone before somebody asks it, and its peers wait for that.
_LEFT_ALONE_S, _PATIENCE = 0.02, timedelta(seconds=20)

_SENDERS = (
    "recv from anybody names the sender",
    "recv from anybody in a group names the sender's global rank",
    "recv from anybody of other dtypes",
    f"{_NUM_OF_EACH} irecvs from anybody for each sender",
    "an irecv from one rank before an irecv from anybody",
)


@judged("unknown_senders", always(*_SENDERS))
def unknown_senders(ctx: RankContext) -> Mapping[str, Trial]:
    """Receive on each rank in turn from whoever sends: in a subgroup, in other dtypes and several at once, too."""
    group, everybody = ctx.process_group, range(ctx.world_size)

    def in_group() -> str:
        members = list(everybody)[1:] if ctx.world_size > 2 else list(everybody)
        return _by_turns(ctx, members, partial(_from_anybody, ctx, dist.new_group(members), members))

    return dict(
        zip(
            _SENDERS,
            (
                lambda: _by_turns(ctx, everybody, partial(_from_anybody, ctx, group, everybody)),
                in_group,
                lambda: first_wrong(
                    *(
                        _by_turns(ctx, everybody, partial(_from_anybody, ctx, group, everybody, dtype=dtype))
                        for dtype in _DTYPES
                    )
                ),
                lambda: _by_turns(ctx, everybody, partial(_several_at_once, ctx)),
                lambda: _by_turns(ctx, everybody, partial(_one_beside_anybody, ctx)),
            ),
            strict=True,
        )
    )


_SENDERS_OF_TAGS = ("recv from anybody of a tag names the sender",)


@judged("unknown_senders_of_tags", always(*_SENDERS_OF_TAGS))
def unknown_senders_of_tags(ctx: RankContext) -> Mapping[str, Trial]:
    """Receive messages with a tag on each rank in turn from whoever sends."""
    everybody = range(ctx.world_size)
    trial = partial(_from_anybody, ctx, ctx.process_group, everybody, tag=7)
    return {_SENDERS_OF_TAGS[0]: lambda: _by_turns(ctx, everybody, trial)}


_RECEIPTS = ("irecvs from anybody before anybody sends, waited for in reverse",)


@judged("receipts_from_anybody", always(*_RECEIPTS))
def receipts_from_anybody(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask on each rank in turn for a message from anybody, and the Work whether it is there, before anybody sends."""
    everybody = range(ctx.world_size)
    return {_RECEIPTS[0]: lambda: _by_turns(ctx, everybody, partial(_asked_before_any, ctx))}


def _by_turns(ctx: RankContext, members: Iterable[int], trial: Callable[[int], str]) -> str:
    """Try it with each of the `members` as the receiver; all of them call it, and others find nothing wrong."""
    return first_wrong(*(trial(receiver) for receiver in members)) if ctx.rank in members else ""


def _from_anybody(
    ctx: RankContext,
    group: Any,
    members: Sequence[int],
    receiver: int,
    *,
    tag: int = 0,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Send from all other `members` to the receiver, which takes them in any order; return what is wrong there."""
    if ctx.rank != receiver:
        dist.send(message(ctx, ctx.rank, receiver).to(dtype), dst=receiver, group=group, tag=tag)
        return ""
    senders = [rank for rank in members if rank != receiver]
    found, clauses = list[int](), list[str]()
    for _ in senders:  # all of them, so that no sender waits
        room = room_for(ctx).to(dtype)
        found.append(dist.recv(room, group=group, tag=tag))
        wrong = wrong_message(ctx, room.float(), found[-1])
        clauses.append(wrong and f"recv() says {found[-1]}, and {wrong}{f', of {dtype}' * (dtype != torch.float32)}")
    return first_wrong(*clauses, unlike("senders were", sorted(found), senders))


def _several_at_once(ctx: RankContext, receiver: int) -> str:
    """Send several messages from each other rank to the receiver, which has called irecv for all of them before."""
    if ctx.rank != receiver:
        works = [isend(ctx, message(ctx, ctx.rank, receiver, number), receiver) for number in range(_NUM_OF_EACH)]
        for work in works:
            work.wait()
        return ""
    rooms = [room_for(ctx) for _ in peers(ctx) for _ in range(_NUM_OF_EACH)]
    for work in [irecv(ctx, room, None) for room in rooms]:
        work.wait()
    came = [_read(ctx, room) for room in rooms]
    lost = [clause for clause, one in zip(map(_unreadable, rooms), came, strict=True) if not one]
    by_sender = {peer: [number for sender, number in filter(None, came) if sender == peer] for peer in peers(ctx)}
    wanted = {peer: [*range(_NUM_OF_EACH)] for peer in peers(ctx)}
    return first_wrong(*lost, unlike("by sender, in the order in which they were asked for, came", by_sender, wanted))


def _asked_before_any(ctx: RankContext, receiver: int) -> str:
    """Send from each other rank to the receiver, once that has called is_completed() of its Works."""
    board = Board(f"irecvs of rank {receiver}")
    if ctx.rank != receiver:
        board.lacking(["asked"], _PATIENCE)  # the message may not come before
        isend(ctx, message(ctx, ctx.rank, receiver), receiver).wait()
        return ""
    rooms = [room_for(ctx) for _ in peers(ctx)]
    works = [irecv(ctx, room, None) for room in rooms]
    time.sleep(_LEFT_ALONE_S)
    early = [number for number, work in enumerate(works) if _counts_as_done(work)]
    board.put("asked")
    for work in works[::-1]:
        work.wait()
    senders = [work._source_rank() for work in works]
    return first_wrong(
        unlike("the receives that count as done before anybody sent, in the order of their calls, are", early, []),
        *(
            wrong and f"its Work says that rank {sender} sent, and {wrong}"
            for wrong, sender in zip(map(partial(wrong_message, ctx), rooms, senders), senders, strict=True)
        ),
        unlike("senders were", sorted(senders), peers(ctx)),
    )


def _counts_as_done(work: Any) -> bool:
    if work.is_completed():
        return True
    try:
        return bool(work.get_future().done())
    except RuntimeError:
        return False


def _read(ctx: RankContext, room: Tensor) -> tuple[int, int] | None:
    """Return whose message that is, and which of them; None if it is nobody's."""
    every = ((peer, number) for peer in peers(ctx) for number in range(_NUM_OF_EACH))
    return next((one for one in every if torch.equal(room, message(ctx, one[0], ctx.rank, one[1]))), None)


def _unreadable(room: Tensor) -> str:
    return f"what came is no rank's message: it begins with {room[: min(3, room.numel())].tolist()}"


def _one_beside_anybody(ctx: RankContext, receiver: int) -> str:
    """Send from each other rank to the receiver, which calls irecv for the last rank's message first."""
    if ctx.rank != receiver:
        isend(ctx, message(ctx, ctx.rank, receiver), receiver).wait()
        return ""
    *others, known = peers(ctx)
    room, rooms = room_for(ctx), [room_for(ctx) for _ in others]
    for work in [irecv(ctx, room, known), *(irecv(ctx, one, None) for one in rooms)]:
        work.wait()
    found = [_read(ctx, one) for one in rooms]
    lost = [_unreadable(one) for one, which in zip(rooms, found, strict=True) if not which]
    senders = sorted(which[0] for which in found if which)
    return first_wrong(wrong_message(ctx, room, known), *lost, unlike("the others' senders were", senders, others))
