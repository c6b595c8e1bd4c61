"""Scenarios of chapter dtypes: every dtype in every operation, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.programs.operations.cell import OF_GROUPS, Cell
from conformance.programs.operations.data import COMPLEX, FLOAT8
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_chapter = InChapter("dtypes")

_PATHS = ("public", "group", "backend")
COPYING = tuple(name for name, operation in OPERATIONS.items() if not operation.reduces)
REDUCING = tuple(name for name, operation in OPERATIONS.items() if operation.reduces)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, dtypes, sizes in (
        ("DT-01", ("float32", "float64", "int32", "int64"), (7,)),
        ("DT-02", ("float16", "bfloat16"), (7, 1025)),
        ("DT-03", ("uint8", "int8", "int16"), (7, 33)),
    ):
        cells = [
            Cell(operation, dtype, numel=numel, root=1, path=path)
            for operation in OPERATIONS
            for dtype in dtypes
            for numel in sizes
            for path in _PATHS
        ]
        yield from _chapter.cells(requirement, cells, 2, 3, 4)
    yield from _chapter.cells(
        "DT-04",
        [Cell(operation, "bool", op, root=1) for operation in OPERATIONS for op in ("SUM", "PRODUCT", "MAX", "MIN")],
        2, 3,
    )  # fmt: skip
    yield from _chapter.cells(
        "DT-05",
        [
            Cell(operation, dtype, numel=numel, root=1, data="bits")
            for operation in COPYING for dtype in FLOAT8 for numel in (7, 300)
        ],
        2, 3,
    )  # fmt: skip
    yield from _chapter.cells(
        "DT-06", [Cell(operation, dtype, root=1) for operation in OPERATIONS for dtype in COMPLEX], 2, 3
    )
    for world_size in (2, 3):
        for requirement, case, needs in (
            ("DT-04", "avg-of-bool", ("bool", "avg")),
            ("DT-07", "order-of-complex", ()),
            ("DT-09", "mixed-dtypes", ()),
        ):
            yield _chapter.scenario(
                requirement, case, "refused_calls", world_size, needs=needs, arguments={"case": case}
            )
        yield _chapter.scenario("DT-11", "unusual-dtypes", "unusual_dtypes", world_size)
        yield _chapter.scenario("DT-12", "low-precision", "sums_of_low_precision", world_size,
                                needs=("float16", "bfloat16"))  # fmt: skip
    given_straight = [
        Cell(operation, dtype, path=path, root=1)
        for operation in OPERATIONS if operation not in OF_GROUPS
        for dtype in COMPLEX
        for path in ("group", "backend")
    ]  # fmt: skip
    yield from _chapter.cells("DT-08", given_straight, 2, refusable=True)
    for world_size in (2, 3):
        for operation in ("all_reduce", "broadcast", "all_gather"):
            yield _chapter.scenario(
                "DT-10", operation.replace("_", "-"), "ranks_that_disagree", world_size,
                arguments={"operation": operation, "about": "dtype"}, needs=("timeouts",),
            )  # fmt: skip
