"""Program `sequence_numbers`: the numbers by which a group counts its collectives, as tools do that compare ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, always, judged
from conformance.programs.operations.calls import named
from conformance.programs.operations.groups import Groups
from conformance.programs.operations.store_messages import all_texts
from conformance.programs.rank_context import RankContext

OF_DEFAULT, OF_NEW = "sequence number of the default group", "sequence number of a new group"
AFTER_MESSAGES = "sequence number of a new group, after messages between two of its ranks"


@judged("sequence_numbers", always(OF_DEFAULT, OF_NEW, AFTER_MESSAGES))
def sequence_numbers(ctx: RankContext) -> Mapping[str, Trial]:
    """Call collectives of several kinds, and ask the group for its sequence number after each. All ranks run it.

    Of the default group only the difference that the calls make counts, since earlier uses may have counted otherwise.
    Raises `Unsupported` where a group has no sequence number.
    """

    def counted(group: Any, before: list[int], start: list[int]) -> str:
        for name, call in _calls(ctx, group).items():
            call()
            after = _told(ctx, group, name)
            if len({now - then for now, then in zip(after, start, strict=True)}) > 1:
                began = f", and was {_by_rank(start)} before all calls" if any(start) else ""
                return f"after {name} it is {_by_rank(after)}{began}: the ranks count differently"
            if after[ctx.rank] <= before[ctx.rank]:
                return f"it was {before[ctx.rank]} before {name}, and is {after[ctx.rank]} after it"
            before = after
        return ""

    def of_default() -> str:
        before = _told(ctx, ctx.process_group, "no collective")
        return counted(ctx.process_group, before, start=before)

    def of_new_group(*, messages: bool = False) -> str:
        groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device)
        try:
            group = groups.get("twin")
            before = _told(ctx, group, "no collective")
            if messages:
                _exchange(ctx, group)
            return counted(group, before, start=[0] * ctx.world_size)
        finally:
            groups.destroy()

    return {
        OF_DEFAULT: of_default,
        OF_NEW: of_new_group,
        AFTER_MESSAGES: lambda: of_new_group(messages=True),
    }


def _exchange(ctx: RankContext, group: Any) -> None:
    """Send some messages from the first rank to the second; the others know nothing of them."""
    for number in range(3):
        tensor = torch.full((3,), float(number), device=ctx.device)
        if ctx.rank == 0:
            dist.send(tensor, 1, group=group)
        elif ctx.rank == 1:
            dist.recv(tensor, 0, group=group)


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


def _told(ctx: RankContext, group: Any, after: str) -> list[int]:
    """Return each rank's sequence number, -1 for a rank that has none while others do.

    Raises `Unsupported` where no rank's group has one.
    """
    try:
        number = str(group._get_sequence_number_for_group())
    except RuntimeError:  # so says torch's own class
        number = ""
    said = all_texts(f"sequence number after {after}", number, ctx.rank, range(ctx.world_size))
    if not any(said):
        ctx.unsupported("the group tells no sequence number")
    return [int(one or -1) for one in said]


def _by_rank(numbers: list[int]) -> str:
    return ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers))
