"""Programs about the coalescing manager: what goes together, and what state a block leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.judged import Trial, first_wrong, judged, unlike
from conformance.programs.operations.calls import named
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

_MIXED = ("kinds mixed in a block", "all_reduce after that", "an error within a block", "a block after that",
          "an empty block", "reductions mixed in a block")  # fmt: skip


def _names(scenario: Scenario) -> tuple[str, ...]:
    """Return the trials of the scenario's `case`: mistakes, or reductions, which may come to values or be refused."""
    return _MIXED[5:] if scenario.arguments["case"] == "reductions" else _MIXED[:5]


@judged(
    "blocks_with_mistakes",
    _names,
    speaks_for={**dict.fromkeys(_MIXED[:2], ("COAL-04",)), **dict.fromkeys(_MIXED[2:5], ("COAL-06",))},
)
def blocks_with_mistakes(ctx: RankContext) -> Mapping[str, Trial]:
    """Mix operations in a block, raise in one, leave one empty; each time the group must work afterwards."""
    group = ctx.process_group

    def ones() -> Tensor:
        return torch.full((3,), float(ctx.rank + 1), device=ctx.device)

    def summed(call: Callable[[Tensor], Any]) -> str:
        tensor = ones()
        call(tensor)
        return unlike("the sum is", tensor.tolist(), [float(sum(range(1, ctx.world_size + 1)))] * 3)

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
            with dist._coalescing_manager(group):  # type: ignore[attr-defined]
                dist.all_reduce(ones(), group=group)
                raise KeyError("of the caller")
        except KeyError:
            return ""
        finally:  # torch 2.13 keeps what was in a block that raised; who wants to go on must take it out
            dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)

    def block(tensor: Tensor) -> None:
        with dist._coalescing_manager(group):  # type: ignore[attr-defined]
            dist.all_reduce(tensor, group=group)

    def empty() -> str:
        with dist._coalescing_manager(group):  # type: ignore[attr-defined]
            pass
        return summed(block)

    def reductions() -> str:
        total, largest = ones(), ones()
        try:
            with dist._coalescing_manager(group):  # type: ignore[attr-defined]
                dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        except Exception:
            return ""
        expected = float(sum(range(1, ctx.world_size + 1)))
        return first_wrong(
            unlike("SUM, the first, gave", total.tolist(), [expected] * 3),
            unlike("MAX, behind a SUM in the block, gave", largest.tolist(), [float(ctx.world_size)] * 3),
        )

    if ctx.arguments["case"] == "reductions":
        return {_MIXED[5]: reductions}
    return dict(
        zip(
            _MIXED[:5],
            (
                kinds, lambda: summed(lambda tensor: dist.all_reduce(tensor, group=group)), raising,
                lambda: summed(block), empty,
            ),
            strict=True,
        )
    )  # fmt: skip
