"""Scenarios of chapter reductions: each reduction in each operation that reduces, for each dtype that has it."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.programs.operations.cell import BITWISE, PATHS, REDUCTIONS, Cell
from conformance.programs.operations.data import COMPLEX, FLOATS, INTEGERS
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_chapter = InChapter("reductions")

REDUCING = tuple(name for name, operation in OPERATIONS.items() if operation.reduces)
_OF_REDUCTIONS = {
    "OP-01": (("SUM", "MAX", "MIN"), (*FLOATS, *INTEGERS)),
    "OP-02": (("PRODUCT",), (*FLOATS, *INTEGERS)),
    "OP-03": (BITWISE, INTEGERS),
    "OP-04": (("AVG",), (*FLOATS, *COMPLEX)),
    "OP-09": (("PREMUL_SUM",), FLOATS),
}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, (reductions, dtypes) in _OF_REDUCTIONS.items():
        cells = [
            Cell(operation, dtype, op, numel=numel, root=1)
            for operation in REDUCING for dtype in dtypes for op in reductions for numel in (9, 130)
        ]  # fmt: skip
        yield from _chapter.cells(requirement, cells, 2, 3, 4)
    average = [
        Cell(operation, dtype, "AVG", numel=numel, group=group)
        for operation in REDUCING for dtype in ("float32", "bfloat16") for numel in (1, 9)
        for group in ("without-0", "ends")
    ]  # fmt: skip
    yield from _chapter.cells("OP-06", average, 3, 4)
    alone = [
        Cell(operation, dtype, "AVG", numel=numel, group="alone")
        for operation in REDUCING for dtype in FLOATS for numel in (1, 7, 8, 9, 1023, 1024)
    ]  # fmt: skip
    yield from _chapter.cells("OP-07", alone, 1, 2)
    every_way = [
        Cell(operation, "int32", op, path=path, lifetime=lifetime, root=1)
        for operation in REDUCING
        for op in REDUCTIONS[:-1]
        for path in PATHS[:-1]
        for lifetime in (("sync", "wait") if path == "public" else ("sync",))
    ]
    yield from _chapter.cells("OP-08", every_way, 2, 3)
    for world_size in (2, 3):
        yield _chapter.scenario(
            "OP-10", "bitwise-of-floats", "refused_calls", world_size, arguments={"case": "bitwise-of-floats"}
        )
        yield _chapter.scenario("OP-05", "average", "average_of_integers", world_size, needs=("avg",))
