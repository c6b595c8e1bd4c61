"""Scenarios of chapter objects."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.scenario import Scenario

_chapter = InChapter("objects")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3, 4):
        yield _chapter.scenario("OBJ-01", "of-all", "objects_of_all", world_size, also=("OBJ-02", "OBJ-06"))
        yield _chapter.scenario("OBJ-03", "of-roots", "objects_of_roots", world_size, needs=("gather_scatter",))
        yield _chapter.scenario("OBJ-04", "sent", "objects_sent", world_size, needs=("send_recv",))
