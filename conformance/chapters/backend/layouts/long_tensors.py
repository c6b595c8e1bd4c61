"""Program `long_tensors`: operations on many MiB, with values that are cheap to make and to compare."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.programs.judged import Trial, first_wrong, judged
from conformance.programs.operations.calls import issue
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import SUMMED, Block, Blocks, Place
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
    """Do `operation` with `numel` elements of float32 in each block, the last rank late. All ranks run it.

    Who has its result uses the memory of what it passed for something else.
    """
    cell = Cell(ctx.arguments["operation"], numel=int(ctx.arguments["numel"]))
    what, place = cell.what, Place(ctx.rank, ctx.world_size)

    def values(blocks: Blocks) -> Tensor:
        return torch.cat([_values(block, cell.numel, ctx) for block in blocks])

    def tried() -> str:
        given = [values(blocks) for blocks in what.inputs(place)]
        got = given if what.in_place and given else [
            torch.full((cell.numel * sum(block.length for block in blocks),), torch.nan, device=ctx.device)
            for blocks in what.outputs(place)
        ]  # fmt: skip
        if ctx.rank == ctx.world_size - 1:
            time.sleep(_LATE_S)
        for work in issue(cell, ctx.process_group, None, place, given, got).works:
            work.wait()
        outputs = () if what.name == "reduce" and not place.is_root else zip(what.outputs(place), got, strict=True)
        wrong = first_wrong(*(_wrong(one, values(blocks)) for blocks, one in outputs))
        for one in given:
            one.fill_(_WRITTEN_OVER)
        return wrong

    return dict.fromkeys(_names(ctx.scenario), tried)


def _values(block: Block, numel: int, ctx: RankContext) -> Tensor:
    """Return what a block holds: exact in float32, and in a sum of all ranks."""
    length, size = numel * block.length, ctx.world_size
    sources = range(size) if block.source == SUMMED else [block.source]
    parts = torch.arange(length, device=ctx.device) % _PERIOD * len(sources)
    offset = sum(_PERIOD * (source + size * (block.target + 1)) for source in sources)
    return (parts + offset).to(torch.float32)


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
