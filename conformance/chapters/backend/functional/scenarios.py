"""Scenarios of chapter functional: collectives that return new tensors, as compiled graphs call them."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.programs.operations.cell import FUNCTIONAL, Cell
from conformance.scenario import Scenario

_chapter = InChapter("functional")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, coalesced in (("FUNC-01", False), ("FUNC-06", True)):
        cells = [
            Cell(operation, dtype, numel=numel, root=1, group=group, lifetime=lifetime, path="functional")
            for operation in FUNCTIONAL if ("coalesced" in operation) is coalesced
            for dtype in ("float32", "int64") for numel in (1, 7, 300)
            for group in ("world", "without-0") for lifetime in ("sync", "inputs-dropped")
        ]  # fmt: skip
        yield from _chapter.cells(requirement, cells, 2, 3)
    for world_size in (2, 3):
        yield _chapter.scenario(
            "FUNC-02", "uses", "functional_collectives", world_size, also=("FUNC-03", "FUNC-04", "FUNC-09", "FUNC-10"),
            needs=("all_gather_into_tensor", "reduce_scatter"),
        )  # fmt: skip
