"""Program `ranks_that_disagree`: a call to which ranks pass arguments that do not match."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance.checkers.explanation import shorten
from conformance.observation import Facts
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import Place
from conformance.programs.operations.judging import Truth
from conformance.programs.operations.store_messages import all_texts
from conformance.programs.operations.tensors import Tensors
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Right

#: The group's own timeout, after which a rank that waits in vain must raise.
_TIMEOUT_S = 1.5


@program_without_truth("ranks_that_disagree", invariants=(), without_ddp=True, misuses=True)
def ranks_that_disagree(ctx: RankContext) -> None:
    """Call `operation` with another dtype, size, split or operation on the last rank: some rank must raise.

    The call uses a group of its own, which may break. All ranks run it.
    """
    group = dist.new_group(timeout=timedelta(seconds=_TIMEOUT_S))
    name = _name(ctx.scenario)
    said = "returned"
    with ctx.phase(name):
        try:
            _call(ctx, group)
        except Exception as error:
            said = f"raised {type(error).__name__}: {shorten(str(error))}"
    everybody = all_texts(name, said, ctx.rank, range(ctx.world_size))
    silent = all(one == "returned" for one in everybody)
    ctx.observe(name, "every rank returned as if nothing had happened" if silent else "")


@ranks_that_disagree.expects
def _ranks_that_disagree(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {_name(scenario): Right()} for rank in range(scenario.world_size)}


def _name(scenario: Scenario) -> str:
    return f"{scenario.arguments['operation']} in which the last rank passes another {scenario.arguments['about']}"


#: The operation that the last rank calls instead.
_INSTEAD = {"all_reduce": "broadcast", "broadcast": "all_gather", "all_gather": "all_reduce"}


def _call(ctx: RankContext, group: Any) -> None:
    """Call the operation and wait for it; splits differ from round to round."""
    about, operation = str(ctx.arguments["about"]), str(ctx.arguments["operation"])
    is_odd = ctx.rank == ctx.world_size - 1
    dtype, numel, turn = "float32", 200, 0
    if is_odd:
        operation = _INSTEAD[operation] if about == "operation" else operation
        dtype, numel = "float64" if about == "dtype" else dtype, 300 if about == "size" else numel
        turn = int(about == "split")
    cell = Cell(operation, dtype, numel=numel, lifetime="wait")
    for work in Tensors.of(Truth(cell, Place(ctx.rank, ctx.world_size, turn=turn)), ctx.device).issue(group).works:
        work.wait()
