"""Programs about dtypes that are short or unusual."""

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

_NUMEL = 500
#: No backend must know these; one that does not must say so.
_UNUSUAL = ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@program_without_truth("sums_of_low_precision", invariants=(), without_ddp=True)
def sums_of_low_precision(ctx: RankContext) -> None:
    """Sum numbers that float16 and bfloat16 must round; observes whether each sum is within the bound.

    Each of the world_size - 1 additions may round by half a unit in the last place of a partial sum, which is no larger
    than the sum of magnitudes. All ranks run it.
    """
    for dtype in (torch.float16, torch.bfloat16):
        parts = [
            torch.rand(_NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
            for rank in range(ctx.world_size)
        ]
        total = parts[ctx.rank].to(ctx.device, copy=True)
        dist.all_reduce(total, group=ctx.process_group)
        exact = torch.stack([part.double() for part in parts]).sum(0)
        bound = exact.abs() * torch.finfo(dtype).eps * max(1, ctx.world_size - 1)
        too_far = (total.cpu().double() - exact).abs() > bound
        name = f"all_reduce SUM of {str(dtype).removeprefix('torch.')}"
        ctx.observe(name, f"{int(too_far.sum())} of {_NUMEL} sums are too far off" if bool(too_far.any()) else "")


@sums_of_low_precision.expects
def _sums_of_low_precision(scenario: Scenario) -> Mapping[int, Facts]:
    names = ("all_reduce SUM of float16", "all_reduce SUM of bfloat16")
    return {rank: dict.fromkeys(names, Right()) for rank in range(scenario.world_size)}


@program_without_truth("unusual_dtypes", invariants=(), without_ddp=True)
def unusual_dtypes(ctx: RankContext) -> None:
    """Sum and broadcast dtypes that few backends know; observes what is wrong; an error is not. All ranks run it."""
    for name in _UNUSUAL:
        dtype = dtype_of(name)
        ctx.observe(f"all_reduce SUM of {name}", _sum_or_error(ctx, dtype))
        ctx.observe(f"broadcast of {name}", _broadcast_or_error(ctx, dtype))


@unusual_dtypes.expects
def _unusual_dtypes(scenario: Scenario) -> Mapping[int, Facts]:
    names = [f"{operation} of {name}" for name in _UNUSUAL for operation in ("all_reduce SUM", "broadcast")]
    return {rank: dict.fromkeys(names, Right()) for rank in range(scenario.world_size)}


def _sum_or_error(ctx: RankContext, dtype: torch.dtype) -> str:
    tensor = torch.full((4,), float(ctx.rank + 1), device=ctx.device).to(dtype)
    try:
        dist.all_reduce(tensor, group=ctx.process_group)
    except Exception as error:
        return "" if shorten(str(error)) else "the error says nothing"
    expected = float(sum(range(1, ctx.world_size + 1)))
    got = tensor.to(torch.float32).tolist()
    return "" if got == [expected] * 4 else f"neither an error nor the sum {expected:g}: got {got}"


def _broadcast_or_error(ctx: RankContext, dtype: torch.dtype) -> str:
    tensor = torch.full((4,), float(ctx.rank + 1), device=ctx.device).to(dtype)
    try:
        dist.broadcast(tensor, group_src=0, group=ctx.process_group)
    except Exception as error:
        return "" if shorten(str(error)) else "the error says nothing"
    got = tensor.to(torch.float32).tolist()
    return "" if got == [1.0] * 4 else f"neither an error nor rank 0's tensor of ones: got {got}"
