"""Scenarios of chapter functional: collectives that return new tensors, as compiled graphs call them."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, every_cell
from conformance.programs.operations.cell import FUNCTIONAL, OF_BACKWARDS, REMAPPED
from conformance.programs.operations.data import FLOATS
from conformance.scenario import Scenario

_grid = BackendGrid("functional")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, coalesced in (("FUNC-01", False), ("FUNC-06", True)):
        operations = [operation for operation in FUNCTIONAL if ("coalesced" in operation) is coalesced]
        axes = {"numel": (1, 7, 300), "group": ("world", "without-0"), "lifetime": ("sync", "inputs-dropped")}
        cells = every_cell(operations, ("float32", "int64"), **axes, root=1, path="functional")
        yield from _grid.cells(requirement, cells, 2, 3)
    for world_size, numel, group in ((2, 300, "world"), (3, 7, "without-0")):
        graphs = every_cell(FUNCTIONAL, ["float32"], numel=numel, group=group, root=1, path="compiled")
        yield from _grid.cells("FUNC-07", graphs, world_size)
        gradients = every_cell(OF_BACKWARDS, FLOATS, numel=numel, group=group, path="backward")
        yield from _grid.cells("FUNC-08", gradients, world_size, by="path")
        remapped = every_cell(REMAPPED, ["float32"], numel=numel, group=group, path="remapped")
        yield from _grid.cells("FUNC-11", remapped, world_size)
    also, needs = ("FUNC-03", "FUNC-04", "FUNC-09", "FUNC-10"), ("all_gather_into_tensor", "reduce_scatter")
    for world_size in (2, 3):
        yield from _grid("FUNC-02", "uses", "functional_collectives", world_size, also=also, needs=needs)
