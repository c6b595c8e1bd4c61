"""What messages from rank to rank hold, and what is wrong with one that came."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.operations.lifetimes import comes_late
from conformance.programs.rank_context import RankContext

SHORT = 5
#: So many messages differ from each other.
NUM_MESSAGES = 300
WRITTEN_OVER = -2.0


def numel_of(ctx: RankContext) -> int:
    """Return the argument `numel`: of how many elements messages are whose trial names no size."""
    return int(ctx.arguments.get("numel", SHORT))


def message(ctx: RankContext, source: int, target: int, number: int = 0, numel: int | None = None) -> Tensor:
    """Return what `source` sends to `target` as its message `number`."""
    numel = numel_of(ctx) if numel is None else numel
    whole = torch.arange(numel) % 50 + 1000 * source + 100 * target + 10_000 * number
    return whole.float().to(ctx.device)


def room_for(ctx: RankContext, numel: int | None = None) -> Tensor:
    """Return a tensor to receive a message into."""
    return torch.full((numel_of(ctx) if numel is None else numel,), -1.0, device=ctx.device)


def wrong_message(ctx: RankContext, got: Tensor, source: int, number: int = 0) -> str:
    """Return what is wrong with a message that this rank got from `source`, and which one it is instead."""
    # What came is looked at once: a receive that was done too early may write meanwhile.
    room, got = got, got.clone()
    wanted = message(ctx, source, ctx.rank, number, got.numel())
    if torch.equal(got, wanted):
        return ""
    if comes_late(lambda: torch.equal(room, wanted)):
        return f"message {number} of rank {source}: the right value came later: recv returned too early"
    number_wrong = int((got != wanted).sum())
    if bool((got[got != wanted] == WRITTEN_OVER).all()):
        return f"{number_wrong} of {got.numel()} elements are what the sender wrote there once its send had come back"
    head = got[:SHORT]  # which tells messages from each other
    for other in range(ctx.world_size):
        for target in range(ctx.world_size):
            for which in range(NUM_MESSAGES):
                if torch.equal(head, message(ctx, other, target, which, len(head))) and torch.equal(
                    got, message(ctx, other, target, which, len(got))
                ):
                    came = f"message {which} of rank {other} for rank {target}"
                    return f"expected message {number} of rank {source} for rank {ctx.rank}, got {came}"
    if bool((got == -1).all()):
        return f"message {number} of rank {source} was not written"
    return f"of message {number} of rank {source} {number_wrong} of {got.numel()} elements are wrong"


def first_of(clauses: Iterable[str]) -> str:
    """Return the first clause that is not empty; later ones are not computed, since each takes time."""
    return next(filter(None, clauses), "")


def peers(ctx: RankContext) -> list[int]:
    """Return the other ranks."""
    return [rank for rank in range(ctx.world_size) if rank != ctx.rank]


def isend(ctx: RankContext, tensor: Tensor, target: int, tag: int = 0) -> Any:
    """Begin to send; return the Work."""
    with ctx.phase(f"isend to rank {target}, which must not wait for the irecv"):
        return dist.isend(tensor, group=ctx.process_group, group_dst=target, tag=tag)


def irecv(ctx: RankContext, tensor: Tensor, source: int | None, tag: int = 0) -> Any:
    """Begin to receive, from anybody if `source` is None; return the Work."""
    return dist.irecv(tensor, group=ctx.process_group, group_src=source, tag=tag)
