"""Scenarios of chapter reductions: each reduction in each operation that reduces, for each dtype that has it."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, every_cell, of_subgroup
from conformance.chapters.variants import each
from conformance.programs.operations.cell import BITWISE, FACTORS, REDUCTIONS, Cell
from conformance.programs.operations.data import COMPLEX, FLOATS, INTEGERS
from conformance.programs.operations.description import REDUCING
from conformance.scenario import Scenario

_grid = BackendGrid("reductions")

_OF_REDUCTIONS = {
    "OP-01": (("SUM", "MAX", "MIN"), (*FLOATS, *INTEGERS)),
    "OP-02": (("PRODUCT",), (*FLOATS, *INTEGERS)),
    "OP-03": (BITWISE, INTEGERS),
    "OP-04": (("AVG",), (*FLOATS, *COMPLEX)),
}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, (reductions, dtypes) in _OF_REDUCTIONS.items():
        cells = every_cell(REDUCING, dtypes, op=reductions, numel=(9, 130), root=1)
        yield from _grid.cells(requirement, cells, 2, 4)
        yield from _grid.cells(requirement, of_subgroup(cells), 3)
    multiplied = every_cell(REDUCING, FLOATS, op="PREMUL_SUM", numel=(9, 130), factor=FACTORS, root=1)
    yield from _grid.cells("OP-09", multiplied, 2, 4, also=("VAL-13",))
    yield from _grid.cells("OP-09", of_subgroup(multiplied), 3, also=("VAL-13",))
    parts = ("without-0", "ends")
    average = every_cell(REDUCING, ("float32", "bfloat16"), op="AVG", numel=(1, 9), group=parts)
    yield from _grid.cells("OP-06", average, 3, 4)
    alone = every_cell(REDUCING, FLOATS, op="AVG", numel=(1, 7, 8, 9, 1023, 1024), group="alone")
    yield from _grid.cells("OP-07", alone, 1, 2)
    small = every_cell(REDUCING, FLOATS, op=("SUM", "MAX", "MIN"), numel=(3, 300), data="subnormals", root=1)
    yield from _grid.cells("OP-11", small, 2, 3)
    great = every_cell(REDUCING, FLOATS, op=("SUM", "AVG", "PRODUCT", "MAX", "MIN"), numel=(8, 300), data="extremes")
    yield from _grid.cells("OP-12", great, 2, 3)
    rounded = every_cell(REDUCING, FLOATS, op=("SUM", "AVG", "PRODUCT"), numel=(8, 300), data="roundings")
    yield from _grid.cells("OP-14", rounded, 2)
    yield from _grid.cells("OP-14", [cell for cell in rounded if cell.operation == "all_reduce"], 4)
    yield from _grid("OP-13", "sparse", "sums_of_sparse_tensors", (2, 3), needs=("sparse",))
    every_way = [
        Cell(operation, "int32", op, path=path, lifetime=lifetime, root=1)
        for operation in REDUCING
        for op in REDUCTIONS[:-1]
        for path in ("public", "group", "backend", "functional")
        for lifetime in (("sync", "wait") if path == "public" else ("sync",))
    ]
    yield from _grid.cells("OP-08", every_way, 2, 3)
    for world_size in (2, 3):
        yield from _grid("OP-10", "", "refused_calls", world_size, each("case", ["bitwise-of-floats"]))
        yield from _grid("OP-05", "average", "average_of_integers", world_size, needs=("avg",))
