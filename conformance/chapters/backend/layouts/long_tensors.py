"""Program `long_tensors`: operations on many MiB, with values that are cheap to make and to compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.judged import Trial, first_wrong, judged
from conformance.programs.operations.calls import named
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

#: A prime, so that no part of a tensor looks like another that begins at a power of two.
_PERIOD = 1009
_WRITTEN_OVER = -2.0
_LATE_S = 0.05


def _names(scenario: Scenario) -> tuple[str, ...]:
    return (f"{scenario.arguments['operation']} of {scenario.arguments['numel']:,} elements",)


@judged("long_tensors", _names)
def long_tensors(ctx: RankContext) -> Mapping[str, Trial]:
    """Do `operation` with `numel` elements of float32 for each rank, the last one late. All ranks run it.

    Who has its result uses the memory of what it passed for something else.
    """
    numel = int(ctx.arguments["numel"])
    operation, in_parts = _OPERATIONS[ctx.arguments["operation"]]

    def tried() -> str:
        given = _values(ctx, numel * (ctx.world_size if in_parts else 1), ctx.rank)
        if ctx.rank == ctx.world_size - 1:
            time.sleep(_LATE_S)
        wrong = operation(ctx, given, numel)
        given.fill_(_WRITTEN_OVER)
        return wrong

    return dict.fromkeys(_names(ctx.scenario), tried)


def _values(ctx: RankContext, numel: int, of: int) -> Tensor:
    """Return what rank `of` passes: exact in float32, and in a sum of all ranks."""
    return (torch.arange(numel, device=ctx.device) % _PERIOD + _PERIOD * of).to(torch.float32)


def _part(ctx: RankContext, numel: int, of: int) -> Tensor:
    """Return what rank `of` has for this one, where it passes as much for every rank."""
    return _values(ctx, ctx.world_size * numel, of)[ctx.rank * numel : (ctx.rank + 1) * numel]


def _rooms(ctx: RankContext, numel: int) -> list[Tensor]:
    return [torch.full((numel,), torch.nan, device=ctx.device) for _ in range(ctx.world_size)]


def _wrong(got: Tensor, expected: Tensor) -> str:
    if torch.equal(got, expected):
        return ""
    differs = got != expected
    first = int(differs.nonzero()[0])
    over = bool((got[differs] == _WRITTEN_OVER).all())
    return (
        f"{int(differs.sum())} of {got.numel()} elements are wrong, the first at [{first}]: expected"
        f" {float(expected[first]):g}, got {float(got[first]):g}"
        f"{', which a rank wrote over what it had passed once its own call had come back' if over else ''}"
    )


def _all_reduce(ctx: RankContext, given: Tensor, numel: int) -> str:
    dist.all_reduce(given, group=ctx.process_group)
    size = ctx.world_size
    return _wrong(given, _values(ctx, numel, 0) * size + _PERIOD * sum(range(size)))


def _broadcast(ctx: RankContext, given: Tensor, numel: int) -> str:
    dist.broadcast(given, group_src=0, group=ctx.process_group)
    return _wrong(given, _values(ctx, numel, 0))


def _reduce(ctx: RankContext, given: Tensor, numel: int) -> str:
    dist.reduce(given, group_dst=0, group=ctx.process_group)
    size = ctx.world_size
    return "" if ctx.rank else _wrong(given, _values(ctx, numel, 0) * size + _PERIOD * sum(range(size)))


def _all_gather_list(ctx: RankContext, given: Tensor, numel: int) -> str:
    outputs = _rooms(ctx, numel)
    dist.all_gather(outputs, given, group=ctx.process_group)
    return first_wrong(*(_wrong(one, _values(ctx, numel, rank)) for rank, one in enumerate(outputs)))


def _gather(ctx: RankContext, given: Tensor, numel: int) -> str:
    outputs = None if ctx.rank else _rooms(ctx, numel)
    dist.gather(given, outputs, group_dst=0, group=ctx.process_group)
    return first_wrong(*(_wrong(one, _values(ctx, numel, rank)) for rank, one in enumerate(outputs or ())))


def _scatter(ctx: RankContext, given: Tensor, numel: int) -> str:
    output = torch.full((numel,), torch.nan, device=ctx.device)
    parts = None if ctx.rank else list(given.split(numel))
    dist.scatter(output, parts, group_src=0, group=ctx.process_group)
    return _wrong(output, _part(ctx, numel, 0))


def _reduce_scatter_list(ctx: RankContext, given: Tensor, numel: int) -> str:
    output = torch.full((numel,), torch.nan, device=ctx.device)
    dist.reduce_scatter(output, list(given.split(numel)), group=ctx.process_group)
    return _wrong(output, _part(ctx, numel, 0) * ctx.world_size + _PERIOD * sum(range(ctx.world_size)))


def _all_to_all_list(ctx: RankContext, given: Tensor, numel: int) -> str:
    outputs = _rooms(ctx, numel)
    dist.all_to_all(outputs, list(given.split(numel)), group=ctx.process_group)
    return first_wrong(*(_wrong(one, _part(ctx, numel, rank)) for rank, one in enumerate(outputs)))


def _all_gather(ctx: RankContext, given: Tensor, numel: int) -> str:
    size = ctx.world_size
    output = torch.full((size * numel,), torch.nan, device=ctx.device)
    named(dist, "all_gather_single", "all_gather_into_tensor")(output, given, group=ctx.process_group)
    return _wrong(output, torch.cat([_values(ctx, numel, rank) for rank in range(size)]))


def _reduce_scatter(ctx: RankContext, given: Tensor, numel: int) -> str:
    size = ctx.world_size
    output = torch.full((numel,), torch.nan, device=ctx.device)
    named(dist, "reduce_scatter_single", "reduce_scatter_tensor")(output, given, group=ctx.process_group)
    return _wrong(output, _part(ctx, numel, 0) * size + _PERIOD * sum(range(size)))


def _all_to_all(ctx: RankContext, given: Tensor, numel: int) -> str:
    size = ctx.world_size
    output = torch.full((size * numel,), torch.nan, device=ctx.device)
    dist.all_to_all_single(output, given, group=ctx.process_group)
    return _wrong(output, torch.cat([_part(ctx, numel, rank) for rank in range(size)]))


def _send_recv(ctx: RankContext, given: Tensor, numel: int) -> str:
    following, previous = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    room = torch.full((numel,), torch.nan, device=ctx.device)
    works: list[Any] = [
        dist.isend(given, group=ctx.process_group, group_dst=following),
        dist.irecv(room, group=ctx.process_group, group_src=previous),
    ]
    for work in works:
        work.wait()
    return _wrong(room, _values(ctx, numel, previous))


#: With whether a rank passes as much for every rank.
_OPERATIONS: Mapping[str, tuple[Callable[[RankContext, Tensor, int], str], bool]] = {
    "all_reduce": (_all_reduce, False),
    "broadcast": (_broadcast, False),
    "reduce": (_reduce, False),
    "all_gather": (_all_gather_list, False),
    "all_gather_single": (_all_gather, False),
    "gather": (_gather, False),
    "scatter": (_scatter, True),
    "reduce_scatter": (_reduce_scatter_list, True),
    "reduce_scatter_single": (_reduce_scatter, True),
    "all_to_all": (_all_to_all_list, True),
    "all_to_all_single": (_all_to_all, True),
    "send_recv": (_send_recv, False),
}
OPERATIONS_OF_LONG_TENSORS = tuple(_OPERATIONS)
