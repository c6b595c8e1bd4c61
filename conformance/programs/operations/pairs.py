"""For each operation, a few fixed cells that cover every compatible pair of values of two axes."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations, product
from typing import Any

from conformance.programs.operations.cell import AXES, Cell, distinct
from conformance.programs.operations.data import COMPLEX
from conformance.programs.operations.description import OPERATIONS

#: Two axes, besides the operation, with a value each.
Pair = tuple[tuple[str, Any], tuple[str, Any]]

_OTHER_AXES = tuple(axis for axis in AXES if axis != "operation")
_SEED = 7
#: How many cells are drawn for each that is kept.
_DRAWS = 40
#: Values with which hardly anything can be wrong.
_WEAK = frozenset({("numel", 0), ("group", "alone")})
#: Values with which every possible pair of other axes is possible.
_PLAIN = tuple(
    {"dtype": dtype, "op": op}
    for dtype, op in (("float32", "SUM"), ("int32", "BAND"), ("float32", "AVG"), ("bool", "SUM"))
)


def pairs_of(cell: Cell) -> frozenset[Pair]:
    """Return the pairs of values in a cell, without axes that do not matter there.

    With a weak value only its own pairs count.
    """
    values = [(axis, getattr(cell, axis)) for axis in _OTHER_AXES if _counts(cell, axis)]
    return frozenset(pair for pair in combinations(values, 2) if _WEAK.intersection(values) <= {*pair})


def covered(cells: Iterable[Cell]) -> frozenset[tuple[str, Pair]]:
    """Return the pairs in `cells`, each with the operation."""
    return frozenset((cell.operation, pair) for cell in cells for pair in pairs_of(cell))


#: Lifetimes that call more than `wait` of a Work.
_ASKED = ("wait-late", "polled", "future", "future-polled", "value", "result", "then", "then-late")


def apart(cell: Cell) -> str:
    """Return the group of scenarios of a cell: cells that many backends lack are apart.

    If a dropped Work fails, gloo's barrier raises its error on ranks that are early.
    """
    if cell.dtype in COMPLEX:
        return "complex-dropped" if cell.lifetime == "dropped" else "complex"
    if cell.dtype == "bool" and cell.what.reduces:
        return "bool"
    return "asked" if cell.lifetime in _ASKED else "dropped" if cell.lifetime == "dropped" else ""


def drawn(seed: int, number: int) -> tuple[Cell, ...]:
    """Return up to `number` drawn cells, without cells that many backends lack or that wait twice (WORK-04)."""
    rng = random.Random(seed)
    cells = (_drawn(rng, {"operation": rng.choice(tuple(OPERATIONS))}) for _ in itertools.count())
    chosen = (cell for cell in cells if _is_tried(cell) and not apart(cell) and cell.lifetime != "wait-twice")
    return distinct(itertools.islice(chosen, number))


def possible() -> frozenset[tuple[str, Pair]]:
    """Return the possible pairs, each with the operation."""
    return frozenset((operation, pair) for operation in OPERATIONS for pair in _plain_cells(operation))


@cache
def paired_cells() -> tuple[Cell, ...]:
    """Return cells that cover all possible pairs of every operation, by a greedy choice. Takes seconds."""
    return tuple(cell for operation in OPERATIONS for cell in _cells_of(operation))


def _cells_of(operation: str) -> Iterator[Cell]:
    plain = _plain_cells(operation)
    missing, rng = dict.fromkeys(plain), random.Random(_SEED)
    while missing:
        pair = next(iter(missing))
        drawn = [_drawn(rng, {**dict(pair), "operation": operation}) for _ in range(_DRAWS)]
        drawn = [cell for cell in drawn if _is_tried(cell) and pair in pairs_of(cell)]
        best = max([*drawn, plain[pair]], key=lambda cell: len(pairs_of(cell) & missing.keys()))
        yield best
        for met in pairs_of(best):
            missing.pop(met, None)


@cache
def _plain_cells(operation: str) -> Mapping[Pair, Cell]:
    """Return for each possible pair of an operation a cell with ordinary other values."""
    found: dict[Pair, Cell] = {}
    for first, second in combinations(_OTHER_AXES, 2):
        for one, other in product(AXES[first], AXES[second]):
            pair = ((first, one), (second, other))
            for rest in _PLAIN:
                cell = _cell({"operation": operation, **rest, **dict(pair)})
                if _is_tried(cell) and pair in pairs_of(cell):
                    found[pair] = cell
                    break
    return found


def _drawn(rng: random.Random, fixed: dict[str, Any]) -> Cell:
    """Return a cell with the `fixed` values and random others, most of them ordinary."""
    values = {
        axis: values[0] if axis not in ("operation", "dtype", "op") and rng.random() < 0.5 else rng.choice(values)
        for axis, values in AXES.items()
    }
    return _cell({**values, **fixed})


def _cell(values: dict[str, Any]) -> Cell:
    """Return the cell; an operation in place writes where it reads."""
    if OPERATIONS[values["operation"]].in_place:
        values["writes"] = values.get("reads", "contiguous")
    return Cell(**values)


def _is_tried(cell: Cell) -> bool:
    """Whether a cell is possible, and no other requirement lets a backend refuse it."""
    of_tensors = cell.path in ("public", "other-thread") or cell.dtype not in COMPLEX
    return cell.is_possible and of_tensors


def _counts(cell: Cell, axis: str) -> bool:
    """Whether the value on `axis` makes a difference in this cell."""
    if axis == "op":
        return OPERATIONS[cell.operation].reduces
    if axis == "writes":
        return not OPERATIONS[cell.operation].in_place
    return axis != "root" or OPERATIONS[cell.operation].rooted


def main() -> None:
    """Print the cells as JSON, one on a line, and on standard error how many pairs meet in them."""
    cells = paired_cells()
    print("[" + ",\n".join(json.dumps(cell.to_json()) for cell in cells) + "]")
    met = len(covered(cells) & possible())
    print(f"{met} of {len(possible())} pairs of values meet, by operation, in {len(cells)} cells", file=sys.stderr)


if __name__ == "__main__":
    main()
