"""Program `sequence_numbers`: the numbers by which a group counts its collectives, as tools do that compare ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, always, judged
from conformance.programs.operations.calls import named
from conformance.programs.operations.groups import Groups
from conformance.programs.operations.hearsay import told
from conformance.programs.rank_context import RankContext

_NUMBERS = ("sequence number of the default group", "sequence number of a new group")


@judged("sequence_numbers", always(*_NUMBERS))
def sequence_numbers(ctx: RankContext) -> Mapping[str, Trial]:
    """Call collectives of several kinds, and ask the group for its sequence number after each. All ranks run it.

    Raises `Unsupported` where a group tells none.
    """

    def counted(group: Any) -> str:
        before = _told(ctx, group, "no collective")
        if set(before) == {None}:
            ctx.unsupported("the group tells no sequence number")
        for name, call in _calls(ctx, group).items():
            call()
            after = _told(ctx, group, name)
            if len(set(after)) > 1:
                return f"after {name} it is {_by_rank(after)}: the ranks count differently"
            if (now := after[ctx.rank]) is None or now <= (was := before[ctx.rank] or 0):
                return f"it was {was} before {name}, and is {now} after it"
            before = after
        return ""

    def of_new_group() -> str:
        groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device)
        try:
            return counted(groups.get("twin"))
        finally:
            groups.destroy()

    return {_NUMBERS[0]: lambda: counted(ctx.process_group), _NUMBERS[1]: of_new_group}


def _calls(ctx: RankContext, group: Any) -> dict[str, Callable[[], Any]]:
    """Return a call of each kind that the backend has; all ranks of the group make them in this order."""
    size = ctx.world_size

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=ctx.device)

    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        "all_reduce": ("", lambda: dist.all_reduce(ones(3), group=group)),
        "broadcast": ("", lambda: dist.broadcast(ones(3), group_src=size - 1, group=group)),
        "all_gather": ("", lambda: dist.all_gather([ones(3) for _ in range(size)], ones(3), group=group)),
        "barrier": ("", lambda: dist.barrier(group=group)),
        "all_to_all_single": ("all_to_all", lambda: dist.all_to_all_single(ones(size), ones(size), group=group)),
        "reduce_scatter_single": (
            "reduce_scatter",
            lambda: named(dist, "reduce_scatter_single", "reduce_scatter_tensor")(ones(3), ones(3 * size), group=group),
        ),
        "coalesced all_reduces": (
            "coalesced",
            lambda: group.allreduce_coalesced([ones(3), ones(5)], dist.AllreduceCoalescedOptions()).wait(),
        ),
        "all_reduce after all of these": ("", lambda: dist.all_reduce(ones(3), group=group)),
    }
    return {name: call for name, (need, call) in calls.items() if not need or need in ctx.declared}


def _told(ctx: RankContext, group: Any, after: str) -> list[int | None]:
    """Return the sequence number that each rank has now, None where the group tells none."""
    try:
        number = str(group._get_sequence_number_for_group())
    except RuntimeError:  # so says torch's own class
        number = ""
    said = told(f"sequence number after {after}", number, ctx.rank, range(ctx.world_size))
    return [int(one) if one else None for one in said]


def _by_rank(numbers: list[int | None]) -> str:
    return ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers))
