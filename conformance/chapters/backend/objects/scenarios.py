"""Scenarios of chapter objects."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.scenario import Scenario

_grid = BackendGrid("objects")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3, 4):
        yield from _grid("OBJ-01", "of-all", "objects_of_all", world_size, also=("OBJ-02", "OBJ-06"))
        yield from _grid("OBJ-03", "of-roots", "objects_of_roots", world_size, needs=("gather_scatter",))
        yield from _grid("OBJ-04", "sent", "objects_sent", world_size, needs=("send_recv",))
