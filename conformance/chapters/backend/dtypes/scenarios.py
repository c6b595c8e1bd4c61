"""Scenarios of chapter dtypes: every dtype in every operation, and what is refused."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import OF_TWO, BackendGrid, every_cell, of_subgroup
from conformance.chapters.variants import each
from conformance.programs.operations.data import COMPLEX, FLOAT8
from conformance.programs.operations.description import COPYING, OPERATIONS
from conformance.scenario import Scenario

_grid = BackendGrid("dtypes")

_PATHS = ("public", "group", "backend")
#: More than 1 MiB of complex128.
_LONG = 70_001


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, dtypes, sizes in (
        ("DT-01", ("float32", "float64", "int32", "int64"), (7,)),
        ("DT-02", ("float16", "bfloat16"), (7, 1025)),
        ("DT-03", ("uint8", "int8", "int16"), (7, 33)),
    ):
        cells = every_cell(OPERATIONS, dtypes, numel=sizes, root=1, path=_PATHS)
        yield from _grid.cells(requirement, cells, 2, 4)
        cells += every_cell(OPERATIONS, dtypes, numel=130, root=1, lifetime="wait")
        yield from _grid.cells(requirement, of_subgroup(cells), 3)
    truths = every_cell(OPERATIONS, ["bool"], op=("SUM", "PRODUCT", "MAX", "MIN"), root=1)
    yield from _grid.cells("DT-04", truths, 2, 3)
    bits = every_cell(COPYING, FLOAT8, numel=(7, 300), root=1, data="bits")
    yield from _grid.cells("DT-05", bits, 2, 3)
    cells = every_cell(OPERATIONS, COMPLEX, numel=(7, 1025), root=1)
    yield from _grid.cells("DT-06", [*cells, *every_cell(OPERATIONS, COMPLEX, numel=_LONG, root=1)], 2)
    yield from _grid.cells("DT-06", [*cells, *of_subgroup(cells)], 3)
    for world_size in (2, 3):
        for requirement, case, needs in (
            ("DT-04", "avg-of-bool", ("bool", "avg")),
            ("DT-07", "order-of-complex", ()),
            ("DT-09", "mixed-dtypes", ()),
        ):
            yield from _grid(requirement, "", "refused_calls", world_size, each("case", [case]), needs=needs)
        yield from _grid("DT-11", "unusual-dtypes", "unusual_dtypes", world_size)
        low = ("float16", "bfloat16")
        yield from _grid("DT-12", "low-precision", "sums_of_low_precision", world_size, needs=low)
    straight = every_cell(OPERATIONS, COMPLEX, numel=(7, 1025), path=("group", "backend", "functional"), root=1)
    straight += every_cell(OPERATIONS, COMPLEX, numel=_LONG, path="group", root=1)
    yield from _grid.cells("DT-08", straight, 2, refusable=True)
    yield from _grid.disagreements("DT-10", "dtype", OF_TWO, 2)
    yield from _grid.disagreements("DT-10", "dtype", OPERATIONS, 3)
