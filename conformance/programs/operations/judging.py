"""The right results of a cell on a rank, and descriptions of wrong results that name the mistake."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.operations.arithmetic import converted, misrounded, misunderstood, scaled
from conformance.programs.operations.cell import BITWISE, REDUCTIONS, Cell
from conformance.programs.operations.data import (
    ALL,
    bits,
    dtype_of,
    extremes,
    numbers,
    reduced,
    roundings,
    sentinel,
    subnormals,
    written_over,
)
from conformance.programs.operations.description import SUMMED, UNTOUCHED, Block, Blocks, Place
from conformance.truth.difference import equal_values, kind

#: How many elements must agree to exclude chance, and how many of two values.
_ENOUGH, _ENOUGH_OF_BOOL = 3, 7
#: An operation beside a cell's has the data of a round that is so much later.
_ROUNDS_LATER = 50
_IN_WRONG_PLACES = "; the right values stand in wrong places"
_OLD_VALUES = "values that the output held before"
#: The largest shift of right values that is looked for.
_MOST_PLACES = 16


@dataclass(frozen=True)
class Truth:
    """The content of every tensor of a cell, at one place, in the place's round."""

    cell: Cell
    place: Place

    @cached_property
    def _block_shape(self) -> tuple[int, ...]:
        return self.cell.block_shape

    @cached_property
    def _numel(self) -> int:
        return math.prod(self._block_shape)

    @property
    def turn(self) -> int:
        """The round."""
        return self.place.turn

    def beside(self) -> Truth:
        """Return the truth of the operation beside it, with other data and the next rank as the root."""
        cell = replace(
            self.cell, operation=self.cell.beside or self.cell.operation, beside="", neighbour="none", lifetime="wait",
            peer="", root=self.cell.root + 1, turns=1,
        )  # fmt: skip
        root = (self.place.root + 1) % self.place.size
        return Truth(cell, replace(self.place, root=root, turn=self.turn + _ROUNDS_LATER))

    def in_round(self, turn: int) -> Truth:
        """Return the truth of another round."""
        return Truth(self.cell, replace(self.place, turn=turn))

    def sent(self, blocks: Blocks) -> Tensor:
        """Return what an input with these blocks holds, flat."""
        return torch.cat([self.of_rank(block.source, block) for block in blocks])

    def received(self, blocks: Blocks) -> Tensor:
        """Return what an output with these blocks must hold, flat."""
        return torch.cat([self.of_block(block) for block in blocks])

    def numel(self, block: Block) -> int:
        """Return how many elements the block has."""
        return self._numel * block.length

    def shape(self, blocks: Blocks) -> tuple[int, ...]:
        """Return the shape of a tensor with these blocks, joined along the first dimension."""
        own = self._block_shape
        if self.cell.form == "stacked" and len(blocks) > 1:
            return (len(blocks), *own)
        if len(blocks) == 1 and blocks[0].length == 1:
            return own
        joined = sum(block.length for block in blocks)
        return (joined * own[0], *own[1:]) if own else (joined,)

    def of_rank(self, source: int, block: Block) -> Tensor:
        """Return what rank `source` passes where `block` is for its target."""
        cell, length = self.cell, self.numel(block)
        rows = self._block_shape[0] if cell.reads == "expanded" and len(self._block_shape) > 1 else 1
        key = {"source": source, "target": block.target, "turn": self.turn}
        if cell.data == "bits":
            values = bits(cell.dtype, length // max(1, rows), **key)
        elif cell.data == "subnormals":
            values = subnormals(cell.dtype, length // max(1, rows), **key)
        else:
            make = {"extremes": extremes, "roundings": roundings}.get(cell.data, numbers)
            values = make(cell.dtype, cell.reduction, length // max(1, rows), size=self.place.size, **key)
        return values if rows == 1 else values.repeat(rows)

    def all_parts(self, block: Block) -> list[Tensor]:
        """Return what every rank passes for the block's target."""
        return [self.of_rank(source, block) for source in range(self.place.size)]

    def rounding(self, blocks: Blocks) -> Tensor:
        """Return the tolerance of each element of an average, 0 for a power of two of ranks.

        NCCL multiplies each part by one over the number of ranks, and rounds it (NCCL user guide: ncclAvg).
        """
        parts = [torch.stack(self.all_parts(block)).abs().double().sum(0) for block in blocks]
        is_exact = self.place.size & (self.place.size - 1) == 0
        return torch.cat(parts) * (0.0 if is_exact else torch.finfo(dtype_of(self.cell.dtype)).eps)

    def of_block(self, block: Block) -> Tensor:
        """Return what an output must hold where `block` is."""
        if block.source == SUMMED:
            return reduced(self.all_parts(block), self.cell.reduction, self.cell.multiplier)
        return self.of_rank(self.place.rank if block.source == UNTOUCHED else block.source, block)


def wrong_values(truth: Truth, blocks: Blocks, got: Tensor, which: str) -> str:
    """Return what is wrong with an output, as a clause that begins with `which`; empty if nothing is."""
    expected = truth.received(blocks)
    shape, dtype = truth.shape(blocks), dtype_of(truth.cell.dtype)
    if got.dtype != dtype or tuple(got.shape) != shape:
        return f"{which} is {kind(got)}, expected {'x'.join(map(str, shape)) or 'scalar'} {truth.cell.dtype}"
    flat = got.detach().to("cpu").reshape(-1)
    differs = ~_same(expected, flat, as_bits=truth.cell.data == "bits")
    if truth.cell.reduction == "AVG" and bool(differs.any()):
        differs &= ~((flat - expected).abs().double() <= truth.rounding(blocks))
    number = int(differs.sum())
    if not number:
        return ""
    first = int(differs.nonzero()[0])
    index = [int(part) for part in torch.unravel_index(torch.tensor(first), shape)] if shape else []
    place = f" at {index}" if index else ""
    wanted, came = _element(expected, first), _element(flat, first)
    return (
        f"{which}: {number} of {flat.numel()} elements are wrong, the first{place}: expected {wanted}, got {came}"
        f"{_reading(truth, blocks, flat, differs)}"
    )


def wrong_outputs(truth: Truth, results: Sequence[Tensor]) -> str:
    """Return what is wrong with a rank's first wrong output, as a clause; empty if nothing is."""
    cell, place = truth.cell, truth.place
    if cell.operation == "reduce" and not (place.is_root or cell.strict):
        return ""  # another requirement judges the other ranks
    outputs = cell.what.outputs(place)
    for number, (blocks, result) in enumerate(zip(outputs, results, strict=False)):
        which = "the result" if len(outputs) == 1 else f"output {number}"
        if wrong := wrong_values(truth, blocks, result, which):
            return wrong
    return ""


def without_reading(wrong: str) -> str:
    """Return a clause of `wrong_values` without its reading as wrong places, for unfinished values."""
    return wrong.removesuffix(_IN_WRONG_PLACES)


def _same(expected: Tensor, got: Tensor, *, as_bits: bool) -> Tensor:
    if as_bits or expected.dtype.itemsize == 1:
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if expected.is_complex():
            expected, got = torch.view_as_real(expected).reshape(-1), torch.view_as_real(got).reshape(-1)
            pairs = expected.view(width[expected.dtype.itemsize]) == got.view(width[got.dtype.itemsize])
            return pairs.view(-1, 2).all(1)
        return expected.view(width[expected.dtype.itemsize]) == got.view(width[got.dtype.itemsize])
    return equal_values(expected, got)


def _reading(truth: Truth, blocks: Blocks, got: Tensor, differs: Tensor) -> str:
    """Return what a wrong output may be instead, as the end of a sentence; may be empty."""
    expected = truth.received(blocks)
    if len(blocks) == 1 and (held := misunderstood(truth.cell.reduction, truth.all_parts(blocks[0]), got)):
        return f"; it holds {held}"  # first: the greatest uint8 is what outputs are filled with
    if truth.cell.data == "roundings" and (how := misrounded(truth.cell.reduction, truth.all_parts(blocks[0]), got)):
        return f"; {how}"
    unwritten = _is_unwritten(got) & differs
    has_old_values = not truth.cell.what.in_place and (got.is_floating_point() or got.is_complex())
    if int(unwritten.sum()) == int(differs.sum()) and _fill_is_distinctive(truth.cell, int(differs.sum())):
        some = "nothing" if bool(_is_unwritten(got).all()) else f"{int(unwritten.sum())} of them"
        told = f"; {some} was written" if some == "nothing" else f"; {some} were not written"
        return told + (f", or {_OLD_VALUES} are in the result" if has_old_values and truth.cell.what.reduces else "")
    if has_old_values and bool(got[differs].isnan().all()) and not bool(expected[differs].isnan().any()):
        return f"; all of them are NaN: {_OLD_VALUES} may be in the result"
    if got.is_floating_point() and _is_flushed(expected[differs], got[differs]):
        return "; subnormal numbers were flushed to zero"
    if int(differs.sum()) >= _ENOUGH and not bool(got[differs].any()):
        return "; all of them are zero"
    if got.is_complex() and bool((got == expected.conj())[differs].all()):
        return "; they are conjugated"
    places = _shift(expected, got, differs)
    if places and (len(blocks) == 1 or places % max(1, truth.numel(blocks[0]))):  # otherwise whole blocks are wrong
        way = "late" if places > 0 else "early"
        return f"; the right values stand {abs(places)} place{'s' * (abs(places) > 1)} too {way}"
    if int(differs.sum()) > 1 and _is_permuted(expected, got):
        return _IN_WRONG_PLACES
    start = 0
    for block in blocks:
        length = truth.numel(block)
        part, wrong = got[start : start + length], differs[start : start + length]
        start += length
        if not bool(wrong.any()):
            continue
        where = "" if len(blocks) == 1 else "the part in which it is "
        if instead := _other_reduction(truth, block, part, wrong):
            return f"; {where or 'it '}holds {instead}"
        parts = truth.all_parts(block) if block.source == SUMMED else []
        factor = scaled(truth.cell.reduction, parts, part) if parts else ""
        if instead := factor or converted(truth.of_block(block), part, parts, truth.cell.reduction):
            return f"; {where or 'it '}holds {instead}"
        for meaning, value in _candidates(truth, block):
            if value.numel() and value.dtype == part.dtype and bool(_same(value, part, as_bits=True)[wrong].all()):
                return f"; {where or 'it '}holds {meaning}"
        return ""
    return ""


def _candidates(truth: Truth, block: Block) -> Iterator[tuple[str, Tensor]]:
    size, cell = truth.place.size, truth.cell
    parts = truth.all_parts(block)

    def summed(parts: Sequence[Tensor]) -> Tensor:
        return reduced(parts, cell.reduction, cell.multiplier)

    if block.source == SUMMED:
        if not cell.what.in_place and cell.reduction != "AVG":
            old = torch.full_like(parts[0].view(torch.uint8), sentinel(parts[0].dtype)).view(parts[0].dtype)
            yield f"the {cell.reduction} with {_OLD_VALUES} in it", summed([*parts, old])
        for source in range(size):
            if size > 1:
                others = [part for rank, part in enumerate(parts) if rank != source]
                yield f"the {cell.reduction} without rank {source}'s part", summed(others)
        for source in range(size) if cell.reduction != "AVG" else ():
            yield f"the {cell.reduction} with rank {source}'s part in it twice", summed([*parts, parts[source]])
    for target in (ALL, *range(size)):
        for source in range(size):
            other_block = Block(source, target, block.length)
            whose = f"rank {source}'s own part" if target == ALL else f"what rank {source} has for rank {target}"
            if (source, target) != (block.source, block.target):
                yield whose, truth.of_rank(source, other_block)
            if block.source == SUMMED and source == 0 and target != block.target:
                there = [truth.of_rank(rank, other_block) for rank in range(size)]
                yield f"the {cell.reduction} for rank {target}", summed(there)
    for turn in range(truth.turn % _ROUNDS_LATER):
        before = truth.in_round(turn)
        yield f"what was right in round {turn}", before.received((block,))
        for source in range(size) if block.source == SUMMED else ():
            mixed = [*parts[:source], before.of_rank(source, block), *parts[source + 1 :]]
            yield f"the {cell.reduction} with rank {source}'s part of round {turn}", summed(mixed)
    other = truth.beside().turn if cell.neighbour.startswith("alike") else truth.turn - _ROUNDS_LATER
    if other >= 0:
        for target in {block.target, *range(size)}:
            for source in {block.source, *range(size)}:
                held = truth.in_round(other).received((Block(source, target, block.length),))
                yield f"what is of the {cell.beside or 'operation'} beside it", held
    yield from _used_again(truth, block, parts)
    for root in range(size):
        if cell.what.rooted and root != truth.place.root:
            yield f"what rank {root} would send as the root", truth.of_rank(root, block)


def _used_again(truth: Truth, block: Block, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the content of a block that was read after its rank had returned and reused the memory."""
    if parts[0].dtype == torch.bool:
        return  # a rank may write any wrong value
    filled = torch.full_like(parts[0].view(torch.uint8), written_over(parts[0].dtype)).view(parts[0].dtype)
    which = "wrote over its tensor once its own call had come back: that was before the others had read it"
    yield f"what a rank {which}", filled
    if block.source == SUMMED:
        for source in range(truth.place.size):
            others = [filled if rank == source else part for rank, part in enumerate(parts)]
            meaning = f"the {truth.cell.reduction} of what rank {source} {which}"
            yield meaning, reduced(others, truth.cell.reduction, truth.cell.multiplier)


def _other_reduction(truth: Truth, block: Block, part: Tensor, wrong: Tensor) -> str:
    """Return which other reduction explains the block; empty if another explanation fits, too.

    It must explain every element, also the right ones: a MAX of signed numbers that were read as unsigned is their MIN
    in the wrong elements alone. One rank's own part is a more likely explanation. Some reductions of bool are the same.
    """
    is_bool = part.dtype == torch.bool
    values = part[wrong].view(torch.uint8).view(-1, part.element_size())
    tells = part.numel() >= _ENOUGH_OF_BOOL if is_bool else len(values.unique(dim=0)) >= min(_ENOUGH, part.numel())
    if block.source != SUMMED or not tells:
        return ""
    parts = truth.all_parts(block)
    if any(bool(_same(one, part, as_bits=True).all()) for one in parts):
        return ""
    others = [op for op in REDUCTIONS if op != truth.cell.reduction and _can_reduce(truth.cell, op)]
    fitting = [op for op in others if bool(_same(reduced(parts, op, truth.cell.multiplier), part, as_bits=True).all())]
    return f"the {' or '.join(fitting)} instead" if len(fitting) == 1 or (is_bool and fitting) else ""


def _fill_is_distinctive(cell: Cell, number: int) -> bool:
    """Whether `number` elements that equal the fill of outputs show that they were not written.

    The fill is a NaN in floating-point dtypes, True in bool and -1 or the greatest in integers.
    """
    dtype = dtype_of(cell.dtype)
    if dtype == torch.bool:
        return False
    is_rare = dtype.itemsize >= 4 and cell.reduction not in ("PRODUCT", *BITWISE)
    return dtype.is_floating_point or dtype.is_complex or is_rare or number >= _ENOUGH


def _can_reduce(cell: Cell, op: str) -> bool:
    return Cell("all_reduce", cell.dtype, op).is_possible and op != "PREMUL_SUM"


def _is_unwritten(got: Tensor) -> Tensor:
    size = got.element_size()
    return (got.contiguous().view(torch.uint8).view(-1, size) == sentinel(got.dtype)).all(1)


def _is_flushed(expected: Tensor, got: Tensor) -> bool:
    expected, got, least = expected.double(), got.double(), torch.finfo(expected.dtype).smallest_normal
    return not bool(got.any()) and bool(((expected != 0) & (expected.abs() < least)).all())


def _shift(expected: Tensor, got: Tensor, differs: Tensor) -> int:
    """Return by how many places right values are too late, negative if too early; 0 if by none.

    The shift must explain every wrong element except at the ends, and more elements than chance would.
    """
    for places in (sign * number for number in range(1, min(_MOST_PLACES, len(got) - _ENOUGH) + 1) for sign in (1, -1)):
        came, right = (got[places:], expected[:-places]) if places > 0 else (got[:places], expected[-places:])
        wrong = differs[places:] if places > 0 else differs[:places]
        if int(wrong.sum()) >= _ENOUGH and bool(_same(right, came, as_bits=True)[wrong].all()):
            return places if len(right[wrong].unique()) >= _ENOUGH else 0
    return 0


def _is_permuted(expected: Tensor, got: Tensor) -> bool:
    """Whether `got` has the expected values in another order, such as that of memory."""
    if expected.is_complex() or expected.dtype.itemsize == 1 or len(set(expected.tolist())) < 4:
        return False
    return bool(torch.equal(expected.sort().values, got.sort().values))


def _element(flat: Tensor, index: int) -> str:
    value = flat[index]
    if value.dtype == torch.bool:
        return f"the byte {flat.view(torch.uint8)[index].item()}"
    if value.dtype.itemsize == 1 and value.dtype.is_floating_point:
        return f"{value.float().item():g}"
    if value.dtype.is_floating_point and value.dtype is not torch.float64:
        return f"{value.item():.9g}"  # digits that distinguish every float32
    return f"{value.item()}"


def wrong_sum(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None) -> str:
    """Return what is wrong with a sum over the group, as a clause; empty if nothing is. All its ranks must call it.

    The call has a `timeout` of its own where the group's is short on purpose: a rank may wait for a processor.
    """
    tensor = torch.full((3,), float(group.rank() + 1), device=device)
    if timeout is None:
        dist.all_reduce(tensor, group=group)
    else:
        options = dist.AllreduceOptions()
        options.timeout = timeout
        group.allreduce([tensor], options).wait()
    expected = float(sum(range(1, group.size() + 1)))
    return "" if tensor.tolist() == [expected] * 3 else f"the sum is {tensor.tolist()}, expected {expected:g} thrice"
