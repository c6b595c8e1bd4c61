"""Program `long_tensors`: operations on many MiB, with values that are cheap to make and to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.judged import Trial, judged
from conformance.programs.operations.calls import named
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

#: A prime, so that no part of a tensor looks like another that begins at a power of two.
_PERIOD = 1009


def _names(scenario: Scenario) -> tuple[str, ...]:
    return (f"{scenario.arguments['operation']} of {scenario.arguments['numel']:,} elements",)


@judged("long_tensors", _names)
def long_tensors(ctx: RankContext) -> Mapping[str, Trial]:
    """Do `operation` with `numel` elements of float32 for each rank. All ranks run it."""
    operation = _OPERATIONS[ctx.arguments["operation"]]
    return {name: partial(operation, ctx, int(ctx.arguments["numel"])) for name in _names(ctx.scenario)}


def _values(ctx: RankContext, numel: int, of: int) -> Tensor:
    """Return what rank `of` passes: exact in float32, and in a sum of all ranks."""
    return (torch.arange(numel, device=ctx.device) % _PERIOD + _PERIOD * of).to(torch.float32)


def _wrong(got: Tensor, expected: Tensor) -> str:
    if torch.equal(got, expected):
        return ""
    differs = got != expected
    first = int(differs.nonzero()[0])
    return (
        f"{int(differs.sum())} of {got.numel()} elements are wrong, the first at [{first}]: expected"
        f" {float(expected[first]):g}, got {float(got[first]):g}"
    )


def _all_reduce(ctx: RankContext, numel: int) -> str:
    tensor = _values(ctx, numel, ctx.rank)
    dist.all_reduce(tensor, group=ctx.process_group)
    size = ctx.world_size
    return _wrong(tensor, _values(ctx, numel, 0) * size + _PERIOD * sum(range(size)))


def _broadcast(ctx: RankContext, numel: int) -> str:
    tensor, root = _values(ctx, numel, ctx.rank), ctx.world_size - 1
    dist.broadcast(tensor, group_src=root, group=ctx.process_group)
    return _wrong(tensor, _values(ctx, numel, root))


def _all_gather(ctx: RankContext, numel: int) -> str:
    size = ctx.world_size
    output = torch.full((size * numel,), torch.nan, device=ctx.device)
    call = named(dist, "all_gather_single", "all_gather_into_tensor")
    call(output, _values(ctx, numel, ctx.rank), group=ctx.process_group)
    return _wrong(output, torch.cat([_values(ctx, numel, rank) for rank in range(size)]))


def _reduce_scatter(ctx: RankContext, numel: int) -> str:
    size = ctx.world_size
    output = torch.full((numel,), torch.nan, device=ctx.device)
    call = named(dist, "reduce_scatter_single", "reduce_scatter_tensor")
    call(output, _values(ctx, size * numel, ctx.rank), group=ctx.process_group)
    mine = _values(ctx, size * numel, 0)[ctx.rank * numel : (ctx.rank + 1) * numel]
    return _wrong(output, mine * size + _PERIOD * sum(range(size)))


def _all_to_all(ctx: RankContext, numel: int) -> str:
    size = ctx.world_size
    output = torch.full((size * numel,), torch.nan, device=ctx.device)
    dist.all_to_all_single(output, _values(ctx, size * numel, ctx.rank), group=ctx.process_group)
    places = slice(ctx.rank * numel, (ctx.rank + 1) * numel)
    return _wrong(output, torch.cat([_values(ctx, size * numel, rank)[places] for rank in range(size)]))


def _send_recv(ctx: RankContext, numel: int) -> str:
    following, previous = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    room, message = torch.full((numel,), torch.nan, device=ctx.device), _values(ctx, numel, ctx.rank)
    works: list[Any] = [
        dist.isend(message, group=ctx.process_group, group_dst=following),
        dist.irecv(room, group=ctx.process_group, group_src=previous),
    ]
    for work in works:
        work.wait()
    return _wrong(room, _values(ctx, numel, previous))


_OPERATIONS: Mapping[str, Callable[[RankContext, int], str]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_single": _all_gather,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "send_recv": _send_recv,
}
OPERATIONS_OF_LONG_TENSORS = tuple(_OPERATIONS)
