"""Programs about long messages, many of them, and the memory of what was sent."""

import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from conformance.chapters.backend.messages.message import (
    WRITTEN_OVER,
    first_of,
    irecv,
    isend,
    message,
    room_for,
    wrong_message,
)
from conformance.programs.judged import Trial, always, judged
from conformance.programs.operations.store_messages import Board
from conformance.programs.rank_context import RankContext

#: Backends send what is short at once, and ask the receiver first for what is long, or is longer than some MiB.
_SENT = tuple((how, numel) for how in ("isend", "send") for numel in (5, 20_000, 300_000, 5_000_000))
_DONE = tuple(f"{how} of {numel} elements, written over once it is done" for how, numel in _SENT)
_PATIENCE = timedelta(seconds=3)
#: So much later than a message is sent the receiver calls recv.
_LATE_S = 0.05


@judged("messages_written_over", always(*_DONE))
def messages_written_over(ctx: RankContext) -> Mapping[str, Trial]:
    """Send from ranks of even numbers to the next ones, which ask late; write over what was sent once that is done."""

    def over(how: str, numel: int) -> str:
        if ctx.rank % 2:
            room = room_for(ctx, numel)
            time.sleep(_LATE_S)
            irecv(ctx, room, ctx.rank - 1).wait()
            return wrong_message(ctx, room, ctx.rank - 1)
        if (target := ctx.rank + 1) < ctx.world_size:
            sent = message(ctx, ctx.rank, target, 0, numel)
            if how == "isend":
                isend(ctx, sent, target).wait()
            else:
                dist.send(sent, group=ctx.process_group, group_dst=target)
            sent.fill_(WRITTEN_OVER)
        return ""

    return {name: partial(over, *sent) for name, sent in zip(_DONE, _SENT, strict=True)}


#: A message whose receive is waited for before its send is.
_DUE = "an irecv that is waited for before the isends are"


@judged("received_when_sent", always(_DUE))
def received_when_sent(ctx: RankContext) -> Mapping[str, Trial]:
    """Wait for a message that comes late, and look at it."""

    def received() -> str:
        following, previous = _neighbours(ctx)
        room = room_for(ctx, 20_000)
        receipt = irecv(ctx, room, previous)
        if ctx.rank == ctx.world_size - 1:
            time.sleep(_LATE_S)
        sending = isend(ctx, message(ctx, ctx.rank, following, 0, 20_000), following)
        receipt.wait()
        wrong = wrong_message(ctx, room, previous)
        sending.wait()
        return wrong

    return {_DUE: received}


#: The longest come last: what fails in it may leave messages behind.
_MANY = (
    "300 isends to the next rank, which asks for the first once all are under way",
    "64 isends of 256 KiB to each neighbour",
)


@judged("many_messages", always(*_MANY))
def many_messages(ctx: RankContext) -> Mapping[str, Trial]:
    """Send 300 short messages, then 64 long ones, at once."""
    following, previous = _neighbours(ctx)

    def under_way() -> str:
        sent = [isend(ctx, message(ctx, ctx.rank, following, number), following) for number in range(300)]
        board = Board("300 isends")
        board.put(f"sent/{ctx.rank}")
        board.lacking([f"sent/{rank}" for rank in range(ctx.world_size)], _PATIENCE)
        rooms = [room_for(ctx) for _ in sent]
        for work in [*(irecv(ctx, room, previous) for room in rooms), *sent]:
            work.wait()
        return first_of(wrong_message(ctx, room, previous, number) for number, room in enumerate(rooms))

    def long() -> str:
        sent = [message(ctx, ctx.rank, following, number, 65_536) for number in range(64)]
        rooms = [room_for(ctx, 65_536) for _ in sent]
        works = [irecv(ctx, room, previous) for room in rooms] + [isend(ctx, tensor, following) for tensor in sent]
        for work in works:
            work.wait()
        return first_of(wrong_message(ctx, room, previous, number) for number, room in enumerate(rooms))

    return dict(zip(_MANY, (under_way, long), strict=True))


def _neighbours(ctx: RankContext) -> tuple[int, int]:
    return (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
