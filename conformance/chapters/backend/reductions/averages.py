"""Program `average_of_integers`."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from conformance.checkers.explanation import shorten
from conformance.observation import Facts
from conformance.programs.operations.data import dtype_of
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Right

_DTYPES = ("int32", "int64", "uint8")


@program_without_truth("average_of_integers", invariants=(), without_ddp=True)
def average_of_integers(ctx: RankContext) -> None:
    """Average integers with AVG; observes what is neither their quotient, rounded, nor an error. All ranks run it."""
    for name in _DTYPES:
        ctx.observe(f"all_reduce AVG of {name}", _average(ctx, dtype_of(name)))


@average_of_integers.expects
def _average_of_integers(scenario: Scenario) -> Mapping[int, Facts]:
    names = [f"all_reduce AVG of {name}" for name in _DTYPES]
    return {rank: dict.fromkeys(names, Right()) for rank in range(scenario.world_size)}


def _average(ctx: RankContext, dtype: torch.dtype) -> str:
    numbers = torch.tensor([1, 2, 10, 11])
    tensor = (numbers + ctx.rank).to(dtype).to(ctx.device)
    try:
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=ctx.process_group)
    except Exception as error:
        return "" if shorten(str(error)) else "the error says nothing"
    total = numbers * ctx.world_size + sum(range(ctx.world_size))
    expected = (total // ctx.world_size).tolist()  # of positive numbers, rounded down and towards zero alike
    return "" if tensor.tolist() == expected else f"the averages are {tensor.tolist()}, expected {expected} or an error"
