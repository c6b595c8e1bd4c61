"""Scenarios of chapter works: every way to learn that an operation is done, and what is known before."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, each_operation, every_cell
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import CALLED, OPERATIONS
from conformance.scenario import Scenario

_grid = BackendGrid("works")

_OF_LIFETIMES = {
    "WORK-03": ("polled", "wait-late"),
    "WORK-04": ("wait-twice", "wait-timeout", "thread"),
    "WORK-08": ("result",),
    "WORK-09": ("future", "value"),
    "WORK-10": ("then", "then-late"),
    "WORK-11": ("future-polled",),
    "WORK-13": ("dropped",),
    "WORK-14": ("inputs-dropped",),
}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, lifetimes in _OF_LIFETIMES.items():
        cells = [
            Cell(operation, dtype, numel=numel, root=1, lifetime=lifetime, path=path)
            for operation in CALLED
            for lifetime in lifetimes
            for dtype, numel in (("float32", 9), ("int64", 2000))
            for path in ("public", "group")
        ]
        yield from _grid.cells(requirement, cells, 2, 3)
    large = {"numel": 50_000, "root": 1, "peer": "late"}
    late = every_cell(OPERATIONS, ["float32"], lifetime=("sync", "wait", "wait-timeout", "future"), **large)
    yield from _grid.cells("WORK-01", late, 2, 3)
    used = {"numel": (9, 50_000), "root": (0, 1), "peer": "late", "lifetime": ("sync", "wait")}
    yield from _grid.cells("WORK-21", every_cell(OPERATIONS, ["float32"], **used), 2, 3)
    for world_size in (2, 3, 4):
        for called in each_operation(CALLED):
            yield from _grid("WORK-02", "", "calls_before_the_last_rank", world_size, called, also=("WORK-18",))
        yield from _grid("WORK-15", "at-once", "works_of_their_own", world_size, also=("WORK-16", "WORK-04"))
        yield from _grid("WORK-22", "may-tell", "what_works_may_tell", world_size)
        yield from _grid("WORK-20", "waiting", "callbacks_that_wait", world_size)
        yield from _grid("WORK-06", "status", "status_of_works", world_size, also=("WORK-08", "WORK-04", "WORK-03"))
    yield from _grid.cells("WORK-18", every_cell(OPERATIONS, ["float32"], path="public", **large), 2, 3)
