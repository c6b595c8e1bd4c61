"""Programs of the smoke ladder about what no requirement asks by itself: who the group says that it is, sparse sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.rank_context import RankContext


@judged("smoke_presence", always("rank and size of the group"))
def presence(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask the default group who it is; nobody communicates."""
    group = ctx.process_group
    return {
        "rank and size of the group": lambda: first_wrong(
            unlike("group.rank() is", group.rank(), ctx.rank), unlike("group.size() is", group.size(), ctx.world_size)
        )
    }


@judged("smoke_name", always("name of the group's backend"))
def name(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask the default group for its backend's name."""

    def named() -> str:
        found = ctx.process_group.name()
        return f"group.name() is {found!r}" if found in ("", "undefined") else ""

    return {"name of the group's backend": named}


@judged("smoke_sparse", always("sum of sparse tensors"))
def sparse(ctx: RankContext) -> Mapping[str, Trial]:
    """Sum tensors of which each rank has row 0 and a row of its own."""

    def summed() -> str:
        rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        shape = (ctx.world_size + 1, 2)
        sent = torch.sparse_coo_tensor(torch.tensor([[0, ctx.rank + 1]]), rows, shape, check_invariants=True)
        tensor = sent.to(ctx.device)
        dist.all_reduce(tensor, group=ctx.process_group)
        expected = [[float(ctx.world_size), 2.0 * ctx.world_size], *[[3.0, 4.0]] * ctx.world_size]
        return unlike("the sum is", tensor.to_dense().tolist(), expected)

    return {"sum of sparse tensors": summed}
