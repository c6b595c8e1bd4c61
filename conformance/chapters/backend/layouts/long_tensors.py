"""Program `long_tensors`: operations on many MiB, with values that are cheap to make and to compare."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from conformance.programs.judged import Trial, first_wrong, judged
from conformance.programs.operations.calls import issue
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import SUMMED, Block, Blocks, Place
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario
from conformance.waiting.kept_waiting import process_seconds

#: A prime, so that no part of a tensor looks like another that begins at a power of two.
_PERIOD = 1009
_WRITTEN_OVER = -2.0
#: More than a scenario has, so that no round's data is another's.
_MOST_RANKS = 16
_LATE_S = 0.05
#: So long somebody looks again and again whether something is done that takes a tenth of that.
_PATIENCE_S, _PAUSE_S = 1.0, 0.001


def _names(scenario: Scenario) -> tuple[str, ...]:
    name = f"{scenario.arguments['operation']} of {scenario.arguments['numel']:,} elements"
    return name, f"{name}, two under way", f"{name}, once they say that they are done"


@judged("long_tensors", _names)
def long_tensors(ctx: RankContext) -> Mapping[str, Trial]:
    """Do `operation` with `numel` elements of float32 in each block, then twice at once. All ranks run it.

    The last rank calls late. A rank that has its result reuses the memory of its inputs. Twice at once also without
    wait(): one is done by the Work's is_completed(), and the other by its future.
    """
    cell = Cell(ctx.arguments["operation"], numel=int(ctx.arguments["numel"]))
    alone, several, asked = _names(ctx.scenario)

    def tried(lifetime: str, *ways: Callable[[Any], bool]) -> str:
        called = replace(cell, lifetime=lifetime)
        if ctx.rank == ctx.world_size - 1:
            time.sleep(_LATE_S)
        under_way = [_begun(ctx, called, turn, way) for turn, way in enumerate(ways)]
        return first_wrong(*(end() for end in under_way[::-1]))

    return {
        alone: lambda: tried("sync", _asks_nothing),
        several: lambda: tried("wait", _asks_nothing, _asks_nothing),
        asked: lambda: tried("wait", _has_future_done, _says_done),
    }


def _asks_nothing(work: Any) -> bool:
    return False


def _says_done(work: Any) -> bool:
    return any(work.is_completed() for _ in process_seconds(_PATIENCE_S, pause_s=_PAUSE_S))


def _has_future_done(work: Any) -> bool:
    try:
        future = work.get_future()
    except RuntimeError:
        return False
    if is_done := any(future.done() for _ in process_seconds(_PATIENCE_S, pause_s=_PAUSE_S)):
        future.wait()  # on a device it orders the stream that is going to read
    return is_done


def _begun(ctx: RankContext, cell: Cell, turn: int, is_done: Callable[[Any], bool]) -> Trial:
    """Issue the operation with the data of that round; return what says what is wrong with it.

    That waits for each Work that is not known as done, before it looks, and for the others afterwards.
    """
    what, place = cell.what, Place(ctx.rank, ctx.world_size, turn=turn)

    def values(blocks: Blocks) -> Tensor:
        return torch.cat([_values(block, cell.numel, turn, ctx) for block in blocks])

    given = [values(blocks) for blocks in what.inputs(place)]
    got = given if what.in_place and given else [
        torch.full((cell.numel * sum(block.length for block in blocks),), torch.nan, device=ctx.device)
        for blocks in what.outputs(place)
    ]  # fmt: skip
    works = issue(cell, ctx.process_group, None, place, given, got).works

    def looked() -> str:
        outputs = () if what.name == "reduce" and not place.is_root else zip(what.outputs(place), got, strict=True)
        return first_wrong(*(_wrong(one.clone(), values(blocks)) for blocks, one in outputs))  # it may change meanwhile

    def end() -> str:
        waited = [work for work in works if not is_done(work)]
        for work in waited:
            work.wait()
        wrong = looked()
        for work in works:
            if work not in waited:
                work.wait()
        if wrong and len(waited) < len(works) and not looked():
            wrong += "; it came later, so that it counted as done too early"
        for one in given:
            one.fill_(_WRITTEN_OVER)
        return wrong

    return end


def _values(block: Block, numel: int, turn: int, ctx: RankContext) -> Tensor:
    """Return what a block holds in that round: exact in float32, and in a sum of all ranks."""
    length, size = numel * block.length, ctx.world_size
    sources = range(size) if block.source == SUMMED else [block.source]
    offset = sum(_PERIOD * (source + size * (block.target + 1 + _MOST_RANKS * turn)) for source in sources)
    return _rising(length, ctx.device) * len(sources) + offset


@lru_cache(maxsize=2)
def _rising(length: int, device: torch.device) -> Tensor:
    """Return numbers that rise from 0 again and again; nobody writes into it."""
    return (torch.arange(length, device=device) % _PERIOD).to(torch.float32)


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
