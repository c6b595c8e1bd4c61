"""Scenarios of chapter optional: what a backend says of itself."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.scenario import Scenario

_grid = BackendGrid("optional")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (1, 2, 3):
        yield from _grid("OPT-01", "claims", "claims_of_a_backend", world_size, also=("OPT-02", "OPT-05", "OPT-06"))
