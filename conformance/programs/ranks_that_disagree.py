"""Program `ranks_that_disagree`: what becomes of a call in which ranks pass what does not go together."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.checkers.explanation import shorten
from conformance.observation import Facts
from conformance.programs.operations.hearsay import told
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.scenario import Scenario
from conformance.truth.expected import Right

#: The group's own timeout: a rank that waits for what cannot come must raise after it.
_TIMEOUT_S = 1.5


@program("ranks_that_disagree", invariants=(), without_ddp=True)
def ranks_that_disagree(ctx: RankContext) -> None:
    """Call `operation` with another dtype, size or operation on the last rank; observes who got data for granted.

    Some rank must notice. It is the ranks' group of its own that is spoilt. All ranks run it.
    """
    group = dist.new_group(timeout=timedelta(seconds=_TIMEOUT_S))
    name = _name(ctx.scenario)
    said = "returned"
    with ctx.phase(name):
        try:
            work = _call(ctx, group)
            if work is not None:
                work.wait()
        except Exception as error:
            said = f"raised {type(error).__name__}: {shorten(str(error))}"
    everybody = told(name, said, ctx.rank, range(ctx.world_size))
    silent = all(one == "returned" for one in everybody)
    ctx.observe(name, "every rank returned as if nothing had happened" if silent else "")


@ranks_that_disagree.expects
def _ranks_that_disagree(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {_name(scenario): Right()} for rank in range(scenario.world_size)}


def _name(scenario: Scenario) -> str:
    return f"{scenario.arguments['operation']} in which the last rank passes another {scenario.arguments['about']}"


def _call(ctx: RankContext, group: Any) -> Any:
    about, operation = ctx.arguments["about"], ctx.arguments["operation"]
    is_odd = ctx.rank == ctx.world_size - 1
    dtype = torch.float64 if about == "dtype" and is_odd else torch.float32
    numel = 300 if about == "size" and is_odd else 200
    if about == "operation" and is_odd:
        operation = {"all_reduce": "broadcast", "broadcast": "all_gather", "all_gather": "all_reduce"}[operation]
    tensor = torch.ones(numel, dtype=dtype, device=ctx.device)
    if operation == "all_reduce":
        return dist.all_reduce(tensor, group=group, async_op=True)
    if operation == "broadcast":
        return dist.broadcast(tensor, group_src=0, group=group, async_op=True)
    slots = [torch.ones_like(tensor) for _ in range(ctx.world_size)]
    return dist.all_gather(slots, tensor, group=group, async_op=True)
