"""Programs about the coalescing manager: what goes together, and what state a block leaves."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from conformance.programs.judged import Trial, first_wrong, judged, unlike
from conformance.programs.operations.calls import coalescing, named
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

_MIXED = ("kinds mixed in a block", "all_reduce after that", "an error within a block", "a block after that",
          "an empty block")  # fmt: skip
_DTYPES = ("float32 and int64 in one call", "float32 and int64 in one block", "int64 and int32 in one call")
#: Integers of this size, taken for floating-point numbers, have another sum.
_UNLIKE = 2**24
_REDUCED = ("blocks with another reduction each", "reductions mixed in a block")


def _names(scenario: Scenario) -> tuple[str, ...]:
    """Return the trials of the scenario's `case`: mistakes; or reductions or dtypes, which may be right or refused."""
    return {"mistakes": _MIXED, "reductions": _REDUCED, "dtypes": _DTYPES}[scenario.arguments["case"]]


@judged(
    "blocks_with_mistakes",
    _names,
    speaks_for={**dict.fromkeys(_MIXED[:2], ("COAL-04",)), **dict.fromkeys(_MIXED[2:], ("COAL-06",))},
)
def blocks_with_mistakes(ctx: RankContext) -> Mapping[str, Trial]:
    """Mix operations in a block, raise in one, leave one empty; each time the group must work afterwards."""
    group = ctx.process_group
    total, largest = [float(sum(range(1, ctx.world_size + 1)))] * 3, [float(ctx.world_size)] * 3

    def ones() -> Tensor:
        return torch.full((3,), float(ctx.rank + 1), device=ctx.device)

    def summed(call: Callable[[Tensor], Any]) -> str:
        tensor = ones()
        call(tensor)
        return unlike("the sum of all_reduce is", tensor, total)

    def kinds() -> str:
        try:
            with dist._coalescing_manager(group):  # type: ignore[attr-defined]
                dist.all_reduce(ones(), group=group)
                gather = named(dist, "all_gather_single", "all_gather_into_tensor")
                gather(torch.empty(3 * ctx.world_size, device=ctx.device), ones(), group=group)
        except RuntimeError as error:
            return "" if "type" in str(error) or "mixed" in str(error) else f"raised RuntimeError: {error}"
        return "raised nothing, expected RuntimeError"

    def raising() -> str:
        try:
            with coalescing(group):
                dist.all_reduce(ones(), group=group)
                raise KeyError("of the caller")
        except KeyError:
            return ""

    def block(tensor: Tensor) -> None:
        with dist._coalescing_manager(group):  # type: ignore[attr-defined]
            dist.all_reduce(tensor, group=group)

    def empty() -> str:
        with dist._coalescing_manager(group):  # type: ignore[attr-defined]
            pass
        return summed(block)

    def one_each() -> str:
        came = {}
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensors = [ones(), ones()]
            with dist._coalescing_manager(group):  # type: ignore[attr-defined]
                for tensor in tensors:
                    dist.all_reduce(tensor, op, group=group)
            came[op] = tensors
        return first_wrong(
            unlike("a block of SUMs gave", came[dist.ReduceOp.SUM], [total] * 2),
            unlike("a block of MAX behind it gave", came[dist.ReduceOp.MAX], [largest] * 2),
        )

    def mixed() -> str:
        first, second = ones(), ones()
        try:
            with dist._coalescing_manager(group):  # type: ignore[attr-defined]
                dist.all_reduce(first, dist.ReduceOp.SUM, group=group)
                dist.all_reduce(second, dist.ReduceOp.MAX, group=group)
        except Exception:
            return ""
        as_told = second.tolist() == total  # torch 2.13 tells the backend one reduction for all: the first
        return first_wrong(
            unlike("SUM, the first, gave", first, total),
            "" if as_told else unlike("MAX, behind a SUM in the block, gave", second, largest),
        )

    def of_two(first: torch.dtype, second: torch.dtype, *, in_block: bool) -> str:
        tensors = [
            torch.full((3,), (ctx.rank + 1) * _UNLIKE, dtype=dtype, device=ctx.device) for dtype in (first, second)
        ]
        try:
            if in_block:
                with dist._coalescing_manager(group):  # type: ignore[attr-defined]
                    for tensor in tensors:
                        dist.all_reduce(tensor, group=group)
            else:
                group.allreduce_coalesced(tensors, c10d.AllreduceCoalescedOptions()).wait()
        except Exception:
            return ""
        return unlike("the sums are", tensors, [[_UNLIKE * one for one in total]] * 2)

    trials = (
        kinds,
        lambda: summed(lambda tensor: dist.all_reduce(tensor, group=group)),
        raising,
        lambda: summed(block),
        empty,
        one_each,
        mixed,
        lambda: of_two(torch.float32, torch.int64, in_block=False),
        lambda: of_two(torch.float32, torch.int64, in_block=True),
        lambda: of_two(torch.int64, torch.int32, in_block=False),
    )
    by_name = dict(zip((*_MIXED, *_REDUCED, *_DTYPES), trials, strict=True))
    return {name: by_name[name] for name in _names(ctx.scenario)}
