"""Scenarios of chapter coalescing: several tensors in one call, and calls that are put together in a block."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.programs.operations.cell import OF_GROUPS, Cell
from conformance.scenario import Scenario

_chapter = InChapter("coalescing")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    sizes = (1, 7, 257, 5000)
    dtypes = ("float32", "float64", "int32", "int64")
    sums = [
        Cell("all_reduce_coalesced", dtype, numel=numel, path=path)
        for dtype in dtypes for numel in sizes for path in ("group", "backend")
    ]  # fmt: skip
    yield from _chapter.cells("COAL-01", sums, 2, 3, 4, by="dtype")
    singles = [
        Cell(operation, dtype, numel=numel, path="group")
        for operation in OF_GROUPS for dtype in dtypes for numel in sizes
    ]  # fmt: skip
    yield from _chapter.cells("COAL-02", singles, 2, 3, 4)
    blocks = [
        Cell(operation, "float32", numel=numel, lifetime=lifetime, peer=peer)
        for operation in ("all_reduce_coalesced", *OF_GROUPS)
        for numel in (7, 20_000) for lifetime in ("sync", "wait") for peer in ("", "late")
    ]  # fmt: skip
    yield from _chapter.cells("COAL-03", blocks, 2, 3)
    reductions = [
        Cell(operation, "int64", op, path=path)
        for operation in ("all_reduce_coalesced", "reduce_scatter_single_coalesced")
        for op in ("MAX", "MIN", "PRODUCT", "BXOR") for path in ("public", "group")
    ]  # fmt: skip
    yield from _chapter.cells("COAL-07", reductions, 2, 3)
    yield from _chapter.cells(
        "COAL-08", [Cell("all_reduce_coalesced", dtype, path="detail") for dtype in dtypes], 2, by="path"
    )
    for world_size in (2, 3):
        for requirement, case, also in (("COAL-04", "mistakes", ("COAL-06",)), ("COAL-05", "reductions", ())):
            yield _chapter.scenario(
                requirement, case, "blocks_with_mistakes", world_size, needs=("coalesced",), also=also,
                arguments={"case": case},
            )  # fmt: skip
