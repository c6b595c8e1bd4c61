"""Scenarios of chapter layouts: every size, shape and place in memory of what an operation reads and writes."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_chapter = InChapter("layouts")

_SMALL = (1, 2, 3, 7, 8, 9, 31, 32, 33, 127, 128, 129, 1009, 1023, 1024, 1025)
#: 16 KiB, 64 KiB and 1 MiB of float32, and what is beside them.
_LARGE = tuple(length + more for length in (2**12, 2**14, 2**18) for more in (-1, 0, 1))
_SPREAD = ("transposed", "strided")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    cells = [Cell(operation, "int32", numel=numel, root=1) for operation in OPERATIONS for numel in _SMALL]
    yield from _chapter.cells("LAY-01", cells, 2, 3, 4)
    cells = [Cell(operation, "float32", numel=numel, root=1) for operation in OPERATIONS for numel in _LARGE]
    yield from _chapter.cells("LAY-01", cells, 2, by="numel")
    cells = [
        Cell(operation, dtype, numel=0, root=1, lifetime=lifetime)
        for operation in OPERATIONS for dtype in ("float32", "int64") for lifetime in ("sync", "wait", "future")
    ]  # fmt: skip
    yield from _chapter.cells("LAY-03", cells, 2, 3)
    cells = [
        Cell(operation, dtype, numel=2, root=1, form=form)
        for operation in OPERATIONS for dtype in ("float32", "int64") for form in ("scalar", "plane", "deep")
    ]  # fmt: skip
    yield from _chapter.cells("LAY-04", cells, 2, 3)
    yield from _spread()
    cells = [
        Cell(operation, dtype, numel=numel, root=1, reads=f"offset-{offset}", writes=f"offset-{offset}")
        for operation in OPERATIONS for dtype, numel in (("uint8", 33), ("float32", 9)) for offset in range(1, 16)
    ]  # fmt: skip
    yield from _chapter.cells("LAY-08", cells, 2)
    cells = [
        Cell(operation, dtype, numel=numel, root=1, in_place=True)
        for operation in OPERATIONS for dtype in ("float32", "int64") for numel in (1, 6, 257)
    ]  # fmt: skip
    yield from _chapter.cells("LAY-09", cells, 2, 3, 4)
    for world_size in (2, 3):
        yield _chapter.scenario("LAY-10", "overlapping", "overlapping_outputs", world_size)
        yield _chapter.scenario(
            "LAY-11", "wrong-splits", "refused_calls", world_size, needs=("all_to_all",),
            arguments={"case": "wrong-splits"},
        )  # fmt: skip
        yield _chapter.scenario("LAY-12", "empty-splits", "empty_splits", world_size, needs=("all_to_all",))
        yield _chapter.scenario("LAY-13", "kinds-of-tensors", "kinds_of_tensors", world_size)


def _spread() -> Iterator[Scenario]:
    """Yield scenarios whose tensors do not lie in one piece, or not in the order of their dimensions."""

    def out_of_place(name: str) -> bool:
        return not OPERATIONS[name].in_place

    inputs = [
        Cell(operation, dtype, numel=20, root=1, reads=layout, writes=layout if in_place else "contiguous", path=path)
        for operation in OPERATIONS
        for in_place in (not out_of_place(operation),)
        for dtype in ("float32", "int64")
        for layout in (*_SPREAD, "expanded")
        for path in ("public", "group")
    ]
    yield from _chapter.cells("LAY-05", inputs, 2, 3, refusable=True)
    outputs = [
        Cell(operation, dtype, numel=20, root=1, writes=layout, path=path)
        for operation in OPERATIONS if out_of_place(operation)
        for dtype in ("float32", "int64") for layout in _SPREAD for path in ("public", "group")
    ]  # fmt: skip
    yield from _chapter.cells("LAY-06", outputs, 2, 3, refusable=True)
    permuted = [
        Cell(operation, "float32", numel=24, root=1, reads=reads, writes=writes)
        for operation in OPERATIONS
        for reads, writes in (
            ("channels_last", "channels_last"), ("channels_last", "contiguous"), ("contiguous", "channels_last"),
        )
    ]  # fmt: skip
    yield from _chapter.cells("LAY-07", permuted, 2, 3, refusable=True)
