"""Scenarios of chapter crossed: for each operation, cells in which every two values of two axes meet.

`pairs` takes half a minute to choose them, so a file holds the cells: `python -m conformance.programs.operations.pairs`
prints it, and a test compares the two.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.data import COMPLEX
from conformance.scenario import Scenario

CELLS = Path(__file__).with_name("cells.json.gz")

_grid = BackendGrid("crossed")

#: Lifetimes that ask a Work for more than to wait.
_ASKED = ("wait-late", "polled", "future", "future-polled", "value", "result", "then", "then-late")


def _apart(cell: Cell) -> str:
    """Return in which scenarios a cell is: what many backends cannot do is apart from what they must all do.

    Where a Work that was dropped fails, gloo's barrier raises its error on those ranks that come before it is gone.
    """
    if cell.dtype in COMPLEX:
        return "complex-dropped" if cell.lifetime == "dropped" else "complex"
    if cell.dtype == "bool" and cell.what.reduces:
        return "bool"
    return "asked" if cell.lifetime in _ASKED else "dropped" if cell.lifetime == "dropped" else ""


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    cells = sorted(map(Cell.from_json, json.loads(gzip.decompress(CELLS.read_bytes()))), key=_apart)
    for world_size, most in ((2, 24), (3, 24), (4, 8)):
        for number in range(most):
            given = {"number": 100 * world_size + number, "length": 50}
            yield from _grid("CROSS-02", f"mixed-{number}", "mixed_calls", world_size, arguments=given)
    for slug, members in groupby(cells, _apart):
        yield from _grid.cells("CROSS-01", members, 3, slug=slug, together=True)
