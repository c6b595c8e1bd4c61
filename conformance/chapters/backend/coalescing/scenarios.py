"""Scenarios of chapter coalescing: several tensors in one call, and calls that are put together in a block."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, every_cell
from conformance.chapters.variants import each
from conformance.programs.operations.cell import OF_GROUPS
from conformance.scenario import Scenario

_grid = BackendGrid("coalescing")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    sizes = (1, 7, 257, 5000)
    dtypes = ("float32", "float64", "int32", "int64")
    sums = every_cell(["all_reduce_coalesced"], dtypes, numel=sizes, path=("group", "backend"))
    yield from _grid.cells("COAL-01", sums, 2, 3, 4, by="dtype")
    singles = every_cell(OF_GROUPS, dtypes, numel=sizes, path="group")
    yield from _grid.cells("COAL-02", singles, 2, 3, 4)
    operations = ("all_reduce_coalesced", *OF_GROUPS)
    for requirement, coalesced in (("COAL-01", operations[:1]), ("COAL-02", OF_GROUPS)):
        many = every_cell(coalesced, ["float32"], path=("group", "functional", "public"), tensors=(1, 2, 8, 40))
        yield from _grid.cells(requirement, many, 2, 3, by="path")
    axes = {"numel": (7, 20_000), "lifetime": ("sync", "wait"), "peer": ("", "late")}
    blocks = every_cell(operations, ["float32"], **axes)
    yield from _grid.cells("COAL-03", blocks, 2, 3)
    reducing = ("all_reduce_coalesced", "reduce_scatter_single_coalesced")
    ops = ("MAX", "MIN", "PRODUCT", "BXOR")
    reductions = every_cell(reducing, ["int64"], op=ops, path=("public", "group"))
    yield from _grid.cells("COAL-07", reductions, 2, 3)
    yield from _grid.cells("COAL-08", every_cell(["all_reduce_coalesced"], dtypes, path="detail"), 2, by="path")
    for world_size in (2, 3):
        mistakes, reduced, mixed = each("case", ("mistakes", "reductions", "dtypes"))
        needs = ("coalesced",)
        yield from _grid("COAL-04", "", "blocks_with_mistakes", world_size, mistakes, needs=needs, also=("COAL-06",))
        yield from _grid("COAL-05", "", "blocks_with_mistakes", world_size, reduced, needs=needs)
        yield from _grid("COAL-09", "", "blocks_with_mistakes", world_size, mixed, needs=needs)
