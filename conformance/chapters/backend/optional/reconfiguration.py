"""Program `reconfigured_groups`: groups that get their members by handles, from torch 2.14 on."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.operations.store_messages import all_texts
from conformance.programs.rank_context import RankContext

_BACKWARDS, _FEWER, _AGAIN = "all ranks, the last one first", "all ranks but the last", "all ranks again"
_TIMEOUT = timedelta(seconds=5)


@judged(
    "reconfigured_groups", always(_BACKWARDS, _FEWER, _AGAIN), speaks_for={_FEWER: ("OPT-11",), _AGAIN: ("OPT-11",)}
)
def reconfigured_groups(ctx: RankContext) -> Mapping[str, Trial]:
    """Give one group three lists of members; the members sum, and broadcast from every root."""
    everybody = list(range(ctx.world_size))
    members = {_BACKWARDS: everybody[::-1], _FEWER: everybody[:-1] or everybody, _AGAIN: everybody}

    @cache
    def group() -> Any:
        return ctx.unconnected_group(_TIMEOUT)

    def joined(number: int, name: str) -> str:
        handles = all_texts("handle", group().get_reconfigure_handle(), ctx.rank, everybody)
        if ctx.rank not in members[name]:
            return ""
        options: Any = c10d.ReconfigureOptions()  # type: ignore[attr-defined]
        options.uuid, options.timeout = number, _TIMEOUT
        options.handles = [handles[rank] for rank in members[name]]
        group().reconfigure(options).wait()
        place = (group().rank(), group().size())
        wanted = (members[name].index(ctx.rank), len(members[name]))
        return unlike("rank and size are", place, wanted) or _wrong(ctx, group(), members[name])

    return {name: partial(joined, number, name) for number, name in enumerate(members, 1)}


def _wrong(ctx: RankContext, group: Any, members: Sequence[int]) -> str:
    """Return what is wrong with a sum and with broadcasts over the group of these global ranks, as a clause."""
    summed = torch.full((3,), float(ctx.rank + 1), device=ctx.device)
    group.allreduce([summed]).wait()
    found = [unlike("the sum is", summed, [float(sum(members) + len(members))] * 3)]
    for root, rank in enumerate(members):
        sent = torch.full((3,), float(ctx.rank), device=ctx.device)
        options = c10d.BroadcastOptions()
        options.rootRank = root
        group.broadcast([sent], options).wait()
        found.append(unlike(f"the broadcast from {root} is", sent, [float(rank)] * 3))
    return first_wrong(*found)
