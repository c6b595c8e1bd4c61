"""Scenarios of chapter functional: collectives that return new tensors, as compiled graphs call them."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, every_cell
from conformance.programs.operations.cell import FUNCTIONAL
from conformance.scenario import Scenario

_grid = BackendGrid("functional")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, coalesced in (("FUNC-01", False), ("FUNC-06", True)):
        operations = [operation for operation in FUNCTIONAL if ("coalesced" in operation) is coalesced]
        axes = {"numel": (1, 7, 300), "group": ("world", "without-0"), "lifetime": ("sync", "inputs-dropped")}
        cells = every_cell(operations, ("float32", "int64"), **axes, root=1, path="functional")
        yield from _grid.cells(requirement, cells, 2, 3)
    also, needs = ("FUNC-03", "FUNC-04", "FUNC-09", "FUNC-10"), ("all_gather_into_tensor", "reduce_scatter")
    for world_size in (2, 3):
        yield from _grid("FUNC-02", "uses", "functional_collectives", world_size, also=also, needs=needs)
