"""Scenarios of chapter crossed: for each operation, cells in which every two values of two axes meet.

`pairs` takes half a minute to choose them, so a file holds the cells: `python -m conformance.programs.operations.pairs`
prints it, and a test compares the two.
"""

import gzip
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.pairs import apart
from conformance.scenario import Scenario

CELLS = Path(__file__).with_name("cells.json.gz")

_grid = BackendGrid("crossed")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    cells = sorted(map(Cell.from_json, json.loads(gzip.decompress(CELLS.read_bytes()))), key=apart)
    for world_size, most in ((2, 24), (3, 24), (4, 8)):
        for number in range(most):
            given = {"number": 100 * world_size + number, "length": 50}
            yield from _grid("CROSS-02", f"mixed-{number}", "mixed_calls", world_size, arguments=given)
    for slug, members in groupby(cells, apart):
        yield from _grid.cells("CROSS-01", members, 3, slug=slug, together=True)
