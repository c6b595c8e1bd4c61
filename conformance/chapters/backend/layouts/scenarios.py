"""Scenarios of chapter layouts: every size, shape and place in memory of what an operation reads and writes."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, each_operation, every_cell, of_subgroup
from conformance.chapters.variants import arguments, dashed, each
from conformance.programs.operations.cell import BITWISE, Cell
from conformance.programs.operations.description import OPERATIONS, REDUCING
from conformance.programs.operations.kinds import KINDS
from conformance.programs.operations.memory import OF_LISTS, WITH_OUTPUTS
from conformance.scenario import Scenario

_grid = BackendGrid("layouts")

_SMALL = (1, 2, 3, 7, 8, 9, 31, 32, 33, 127, 128, 129, 1009, 1023, 1024, 1025)
#: 16 KiB, 64 KiB and 1 MiB of float32.
_LARGE = (2**12, 2**14, 2**18)
_BESIDE_LARGE = tuple(length + more for length in _LARGE for more in (-1, 1))
#: By world size, 16 MiB of float32 and one more: backends choose another way for more than some MiB. And 1.1 MiB, since
#: they also choose it by the number of ranks.
_LONG = {2: 2**22 + 1, 4: 300_007}
#: A slot that is used again may be wrong the second time, or the third.
_ROUNDS = 4
_DTYPES = ("float32", "int64")
#: What DDP does with parameters while gradients are enabled.
_OF_LEAVES = ("all_reduce", "broadcast")
_SPREAD = ("transposed", "strided")
_LISTS = tuple(pair for how in OF_LISTS for pair in ((how, "contiguous"), ("contiguous", how), (how, how)))


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    cells = every_cell(OPERATIONS, ["int32"], numel=_SMALL, root=1)
    yield from _grid.cells("LAY-01", cells, 2, 4)
    yield from _grid.cells("LAY-01", of_subgroup(cells), 3)
    cells = every_cell(OPERATIONS, ["float32"], numel=_LARGE, root=1, turns=_ROUNDS)
    cells += every_cell(OPERATIONS, ["float32"], numel=_BESIDE_LARGE, root=1)
    cells += every_cell(OPERATIONS, ("bfloat16", "int64", "uint8"), op=("SUM", "MAX"), numel=_LARGE[-1], root=1)
    cells += every_cell(REDUCING, ["float32"], op=("AVG", "PRODUCT", "MIN", "PREMUL_SUM"), numel=_LARGE[1:], root=1)
    cells += every_cell(REDUCING, ["int32"], op=BITWISE, numel=_LARGE[1:], root=1)
    yield from _grid.cells("LAY-01", cells, 2, by="numel")
    for operation, what in OPERATIONS.items():
        if what.coalesced:
            continue  # which have several tensors, the longest of three times the size
        needs = tuple(filter(None, [what.needs]))
        for world_size, numel in _LONG.items():
            called = arguments(f"long-{dashed(operation)}", operation=operation, numel=numel)
            yield from _grid("LAY-01", "", "long_tensors", world_size, called, needs=needs)
    cells = every_cell(OPERATIONS, _DTYPES, numel=0, root=1, lifetime=("sync", "wait", "future"))
    several = [operation for operation in OPERATIONS if OPERATIONS[operation].coalesced]
    among = every_cell(several, _DTYPES, form="one-empty", path=("public", "group"), tensors=(3, 5))
    yield from _grid.cells("LAY-03", cells + among, 2, 3)
    cells = every_cell(OPERATIONS, _DTYPES, numel=2, root=1, form=("scalar", "plane", "deep"))
    yield from _grid.cells("LAY-04", cells, 2, 3)
    yield from _spread()
    cells = [
        Cell(operation, dtype, numel=numel, root=1, reads=f"offset-{offset}", writes=f"offset-{offset}")
        for operation in OPERATIONS
        for dtype, numel in (("uint8", 33), ("float32", 9))
        for offset in range(1, 16)
    ]
    yield from _grid.cells("LAY-08", cells, 2)
    cells = [
        Cell(operation, dtype, numel=5, root=root, reads=reads, writes=writes, path=path)
        for operation in OPERATIONS
        for dtype in _DTYPES
        for root in (0, 1)
        for reads, writes in _LISTS
        for path in ("public", "group")
    ]
    yield from _grid.cells("LAY-14", cells, 2, 3)
    beside = {"reads": WITH_OUTPUTS, "root": (0, 1), "path": ("public", "group")}
    yield from _grid.cells("LAY-15", every_cell(OPERATIONS, _DTYPES, numel=(6, 257), **beside), 2, 3)
    cells = every_cell(OPERATIONS, _DTYPES, numel=(1, 6, 257), root=1, in_place=True)
    yield from _grid.cells("LAY-09", cells, 2, 3, 4)
    yield from _kinds()
    yield from _lazy()
    for world_size in (2, 3):
        yield from _grid("LAY-10", "overlapping", "overlapping_outputs", world_size)
        wrong = each("case", ("wrong-splits", "splits-of-elements", "negative-splits"))
        yield from _grid("LAY-11", "", "refused_calls", world_size, wrong, needs=("all_to_all",))
        yield from _grid("LAY-12", "empty-splits", "empty_splits", world_size, needs=("all_to_all",))


def _lazy() -> Iterator[Scenario]:
    """Yield scenarios whose tensors negate or conjugate what lies in their memory, as torch's views of some do."""
    for operation in each_operation(OPERATIONS):
        for bit, dtype in (("negative", "float32"), ("conjugate", "complex64")):
            yield from _grid("LAY-16", bit, "lazy_tensors", 2, operation, arguments(bit=bit, dtype=dtype))


def _kinds() -> Iterator[Scenario]:
    """Yield scenarios whose tensors autograd knows of, or that are in one of torch's modes.

    Autograd may refuse that an operation writes to a leaf by torch's own means; DDP needs two operations to do so.
    """
    cells = every_cell(OPERATIONS, ["float32"], root=1, lifetime=("sync", "wait"), kind=tuple(filter(None, KINDS)))
    of_leaves = [cell for cell in cells if not KINDS[cell.kind].of_outputs and cell.operation not in _OF_LEAVES]
    yield from _grid.cells("LAY-13", [cell for cell in cells if cell not in of_leaves], 2, 3)
    yield from _grid.cells("LAY-13", of_leaves, 2, 3, slug="leaves", refusable=True)


def _spread() -> Iterator[Scenario]:
    """Yield scenarios whose tensors do not lie in one piece, or not in the order of their dimensions."""

    def out_of_place(name: str) -> bool:
        return not OPERATIONS[name].in_place

    operations = list(filter(out_of_place, OPERATIONS))
    for dtypes, world_sizes in ((_DTYPES, (2, 3)), (("complex128",), (2,)), (("complex64",), (3,))):
        inputs = [
            Cell(operation, dtype, numel=20, root=1, reads=layout, writes=writes, path=path)
            for operation, what in OPERATIONS.items()
            for dtype in dtypes
            for layout in (*_SPREAD, "expanded")
            for writes in (layout if what.in_place else "contiguous",)
            for path in ("public", "group")
        ]
        yield from _grid.cells("LAY-05", inputs, *world_sizes, refusable=True)
        outputs = every_cell(operations, dtypes, numel=20, root=1, writes=_SPREAD, path=("public", "group"))
        yield from _grid.cells("LAY-06", outputs, *world_sizes, refusable=True)
    permuted = [
        Cell(operation, "float32", numel=24, root=1, reads=reads, writes=writes)
        for operation in OPERATIONS
        for reads, writes in (
            ("channels_last", "channels_last"),
            ("channels_last", "contiguous"),
            ("contiguous", "channels_last"),
        )
    ]
    yield from _grid.cells("LAY-07", permuted, 2, 3, refusable=True)
