"""Scenarios of chapter optional: what a backend says of itself, and what torch 2.14 added to groups."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.scenario import Scenario

_grid = BackendGrid("optional")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (1, 2, 3):
        yield from _grid("OPT-01", "claims", "claims_of_a_backend", world_size, also=("OPT-02", "OPT-05", "OPT-06"))
        also, needs = ("OPT-08", "OPT-09"), ("hooks",)
        yield from _grid("OPT-07", "hooks", "hooks_of_a_group", world_size, also=also, needs=needs)
        needs = ("reconfigure",)
        yield from _grid("OPT-10", "handles", "reconfigured_groups", world_size, also=("OPT-11",), needs=needs)
