"""Scenarios of chapter crossed: cells in which every two values of two axes meet, as `pairs` chooses them.

To choose takes seconds; so the cells are in a file, `python -m conformance.programs.operations.pairs` writes them, and
a test tells when they are not those of today.
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


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    cells = [Cell.from_json(data) for data in json.loads(CELLS.read_text())]
    yield from _grid.cells("CROSS-01", cells, 3, 4)
