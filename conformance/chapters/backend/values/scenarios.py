"""Scenarios of chapter values: each element of each output of each operation, on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.programs.operations.cell import DATA, LIFETIMES, NEIGHBOURS, Cell
from conformance.programs.operations.data import FLOATS, INTEGERS
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_chapter = InChapter("values")

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
_OF_ROOTED = {"VAL-03": "broadcast", "VAL-04": "reduce", "VAL-09": "gather", "VAL-10": "scatter"}
COPYING = tuple(name for name, operation in OPERATIONS.items() if not operation.reduces)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for requirement, operations in _OF_OPERATIONS.items():
        cells = [
            Cell(operation, "int64", numel=numel, group=group, form=form)
            for operation in operations
            for numel in _SIZES
            for group in _GROUPS
            for form in (("flat", "stacked") if numel == 7 else ("flat",))
        ]
        yield from _chapter.cells(requirement, [one for one in cells if one.form == "flat"], 2, 3, 4, 5)
        yield from _chapter.cells(requirement, [one for one in cells if one.form == "stacked"], 3, by="form")
    for requirement, operation in _OF_ROOTED.items():
        cells = [
            Cell(operation, "int64", numel=numel, group=group, root=root)
            for root in range(4)
            for numel in (1, 7, 257)
            for group in _GROUPS
        ]
        for world_size in (2, 3, 4):
            own = [one for one in cells if one.root < world_size - (one.group == "without-0")]
            yield from _chapter.cells(requirement, own, world_size)
    for world_size in (2, 3, 4):
        cells = [Cell("reduce", "int64", numel=numel, root=root, strict=True)
                 for root in range(world_size) for numel in (1, 7, 257)]  # fmt: skip
        yield from _chapter.cells("VAL-05", cells, world_size)
        for dtype in ("float32", "float64"):
            yield _chapter.scenario(
                "VAL-02", f"inexact-{dtype}", "same_bits_everywhere", world_size, also=("VAL-18",),
                arguments={"dtype": dtype, "numel": 1000}, needs=(),
            )  # fmt: skip
        yield _chapter.scenario("VAL-19", "not-a-number", "not_a_number", world_size)
    yield from _side_effects()
    yield from _many()
    bits = [
        Cell(operation, dtype, numel=300, data="bits", root=1)
        for operation in COPYING
        for dtype in (*FLOATS, *INTEGERS, "bool")
    ]
    yield from _chapter.cells("VAL-19", bits, 2, 3)


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
    yield from _chapter.cells("VAL-13", [one for one in everything if not one.what.in_place], 3)
    yield from _chapter.cells("VAL-14", everything, 2, 3, 4)
    lengths = [Cell(operation, dtype, numel=numel, root=1, data=data)
               for operation in OPERATIONS for dtype in ("float32", "bfloat16", "int64")
               for numel in (15, 16, 17, 1000, 1023, 1025) for data in DATA]  # fmt: skip
    yield from _chapter.cells("VAL-15", lengths, 3)


def _many() -> Iterator[Scenario]:
    """Yield scenarios with many rounds of one call, and with others beside it."""
    rounds = [Cell(operation, dtype, root=1, turns=50) for operation in OPERATIONS for dtype in ("float32", "int64")]
    yield from _chapter.cells("VAL-16", rounds, 2)
    beside = [
        Cell(operation, dtype, numel=100, root=1, neighbour=neighbour, lifetime=lifetime)
        for operation in OPERATIONS
        for dtype in ("float32", "int32")
        for neighbour in NEIGHBOURS[1:]
        for lifetime in LIFETIMES[:2]
    ]
    yield from _chapter.cells("VAL-17", beside, 2, 3)
