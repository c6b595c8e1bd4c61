"""Scenarios of chapter crossed: for each operation, cells in which every two values of two axes meet.

`pairs` chooses them, which takes seconds; so the cells are in a file that `python -m
conformance.programs.operations.pairs` prints, and a test tells when they are not those of today.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.programs.operations.cell import Cell
from conformance.scenario import Scenario

CELLS = Path(__file__).with_name("cells.json")

_grid = BackendGrid("crossed")

#: Lifetimes that ask a Work for more than to wait.
_ASKED = ("wait-late", "polled", "future", "future-polled", "value", "result", "then", "then-late")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    cells = [Cell.from_json(data) for data in json.loads(CELLS.read_text())]
    # Apart: a backend whose Works know less than others is right in all that does not ask them.
    asked = [cell for cell in cells if cell.lifetime in _ASKED]
    plain = [cell for cell in cells if cell.lifetime not in _ASKED]
    yield from _grid.cells("CROSS-01", plain, 3, together=True)
    yield from _grid.cells("CROSS-01", asked, 3, slug="asked", together=True)
