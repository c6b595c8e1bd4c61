"""Scenarios of chapter subgroups: every operation in every kind of group, and what groups know."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_chapter = InChapter("subgroups")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (3, 4):
        for requirement, slug, program, also in (
            ("GRP-01", "who-is-where", "who_is_where", ("GRP-04", "GRP-14")),
            ("GRP-02", "roots", "roots_of_subgroups", ()),
            ("GRP-06", "apart", "groups_apart", ("GRP-08", "GRP-10", "GRP-12", "GRP-15")),
        ):
            yield _chapter.scenario(requirement, slug, program, world_size, also=also)
        yield _chapter.scenario(
            "GRP-09", "unknown-ranks", "refused_calls", world_size, arguments={"case": "unknown-ranks"}
        )
        yield _chapter.scenario(
            "GRP-07", "local", "local_synchronisation", world_size, needs=("local_synchronization",)
        )
    rooted = [
        Cell(operation, "int64", root=root, group=group, path=path)
        for operation, what in OPERATIONS.items() if what.rooted
        for root in range(3) for group in ("without-0", "permuted") for path in ("public", "group")
    ]  # fmt: skip
    yield from _chapter.cells("GRP-03", rooted, 4)
    alone = [
        Cell(operation, dtype, numel=numel, group="alone")
        for operation in OPERATIONS for dtype in ("float32", "int64") for numel in (1, 7)
    ]  # fmt: skip
    yield from _chapter.cells("GRP-05", alone, 1, 3)
    sizes = [Cell(operation, "int32", root=root) for operation in OPERATIONS for root in (0, 1, 4)]
    yield from _chapter.cells("GRP-13", sizes, 1, 2, 3, 5, 8)
