"""Scenarios of chapter values: each element of each output of each operation, on every rank."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, every_cell
from conformance.chapters.variants import Variant, arguments, each
from conformance.programs.operations.cell import DATA, LIFETIMES, NEIGHBOURS, Cell
from conformance.programs.operations.data import FLOATS, INTEGERS
from conformance.programs.operations.description import COPYING, OPERATIONS
from conformance.programs.operations.memory import WHOLE
from conformance.scenario import Scenario

_grid = BackendGrid("values")

_SIZES = (1, 2, 7, 64, 257)
_GROUPS = ("world", "permuted", "without-0")
#: What each of these requirements is about, beside `VAL-03` and its like, which try every root.
_OF_OPERATIONS = {
    "VAL-01": ("all_reduce",),
    "VAL-06": ("all_gather",),
    "VAL-07": ("all_gather_single",),
    "VAL-08": ("reduce_scatter", "reduce_scatter_single"),
    "VAL-11": ("all_to_all",),
    "VAL-12": ("all_to_all_single", "all_to_all_uneven"),
}
_OF_ROOTED = {
    "VAL-03": "broadcast", "VAL-04": "reduce", "VAL-09": "gather", "VAL-10": "scatter", "VAL-21": "gather_single",
}  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, operations in _OF_OPERATIONS.items():
        flat = every_cell(operations, ["int64"], numel=_SIZES, group=_GROUPS)
        yield from _grid.cells(requirement, flat, 2, 3, 4, 5)
        stacked = every_cell(operations, ["int64"], numel=7, group=_GROUPS, form="stacked")
        yield from _grid.cells(requirement, stacked, 3, by="form")
    for requirement, operation in _OF_ROOTED.items():
        cells = every_cell([operation], ["int64"], root=(0, 1, 2, 3), numel=(1, 7, 257), group=_GROUPS)
        for world_size in (2, 3, 4):
            own = [one for one in cells if one.root < world_size - (one.group == "without-0")]
            yield from _grid.cells(requirement, own, world_size)
    for world_size in (2, 3, 4):
        roots = tuple(range(world_size))
        cells = every_cell(["reduce"], ["int64"], root=roots, numel=(1, 7, 257), strict=True)
        yield from _grid.cells("VAL-05", cells, world_size)
        inexact = each("dtype", ("float32", "float64"))
        yield from _grid("VAL-02", "inexact", "same_bits_everywhere", world_size, inexact, also=("VAL-18",))
    for world_size in (2, 3):
        for requirement, operation, needs in (
            ("VAL-06", "all_gather", ()), ("VAL-08", "reduce_scatter", ("reduce_scatter",)),
            ("VAL-11", "all_to_all", ("all_to_all",)),
        ):  # fmt: skip
            lists = arguments(operation=operation) | Variant(needs=needs)
            yield from _grid(requirement, "unlike-parts", "unlike_parts", world_size, lists)
        yield from _grid("VAL-12", "one-sided-splits", "one_sided_splits", world_size, needs=("all_to_all",))
    axes = {
        "path": ("public", "group"),
        "lifetime": LIFETIMES[:2],
        "reads": ("contiguous", "offset-1"),
        "numel": (0, 5000),
    }
    singles = every_cell(["gather_single"], (*FLOATS, *INTEGERS, "bool"), root=1, data="bits", **axes)
    yield from _grid.cells("VAL-21", singles, 3, slug="bits")
    yield from _side_effects()
    yield from _many()
    bits = every_cell(COPYING, (*FLOATS, *INTEGERS, "bool"), numel=300, data="bits", root=1)
    yield from _grid.cells("VAL-19", bits, 2, 3)


def _side_effects() -> Iterator[Scenario]:
    """Yield scenarios about what an operation must leave alone, and what it must not leave out."""
    layouts = ("contiguous", "offset-3")
    everything = [
        Cell(operation, dtype, numel=numel, root=1, reads=layout, writes=layout)
        for operation in OPERATIONS
        for dtype in ("float32", "int64")
        for numel in (5, 200)
        for layout in layouts
    ]
    yield from _grid.cells("VAL-14", everything, 2, 3, 4, also=("VAL-13", "VAL-20"))
    numbers = (15, 16, 17, 1000, 1023, 1025)
    lengths = every_cell(OPERATIONS, ("float32", "bfloat16", "int64"), numel=numbers, root=1, data=DATA)
    yield from _grid.cells("VAL-15", lengths, 3)


def _many() -> Iterator[Scenario]:
    """Yield scenarios with many rounds of one call, and with others beside it."""
    rounds = every_cell(OPERATIONS, ("float32", "int64"), root=1, turns=50)
    lists = {"reads": WHOLE, "writes": WHOLE, "lifetime": LIFETIMES[:2]}
    rounds += every_cell(OPERATIONS, ["float32"], root=(0, 1), turns=8, reuses=True, **lists)
    yield from _grid.cells("VAL-16", rounds, 2)
    axes = {"neighbour": NEIGHBOURS[1:], "lifetime": LIFETIMES[:2]}
    beside = every_cell(OPERATIONS, ("float32", "int32"), numel=100, root=1, **axes)
    yield from _grid.cells("VAL-17", beside, 2, 3)
