"""Scenarios of chapter lifecycle: how groups end, and what they leave."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, each_operation
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_grid = BackendGrid("lifecycle")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for called in each_operation(OPERATIONS):
        yield from _grid("LIFE-06", "memory-of", "kept_memory", (2, 3), called, deadline_s=30.0)
    yield from _grid("LIFE-03", "exits", "exits_without_destroy", 2, deadline_s=60.0)
    yield from _grid("LIFE-10", "anew", "begins_anew", 2, deadline_s=60.0)
    for world_size in (2, 3):
        yield from _grid("LIFE-05", "leaks", "leaks", world_size, also=("LIFE-06",), deadline_s=30.0)
        yield from _grid("LIFE-02", "message-of-a-leaver", "message_of_a_leaver", world_size, needs=("send_recv",))
        yield from _grid("LIFE-02", "ends", "ends_of_groups", world_size, also=("LIFE-04", "LIFE-09"))
