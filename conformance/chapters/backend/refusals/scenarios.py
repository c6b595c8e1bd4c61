"""Scenarios of chapter refusals: each capability, on backends that do not declare it."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, every_cell
from conformance.chapters.backend.refusals.undeclared import CALLS
from conformance.chapters.variants import dashed
from conformance.programs.operations.cell import BITWISE, Cell
from conformance.programs.operations.data import COMPLEX, FLOAT8
from conformance.programs.operations.description import OPERATIONS, REDUCING
from conformance.scenario import Scenario

_grid = BackendGrid("refusals")

_DTYPES = {
    **{name: (name,) for name in ("float16", "bfloat16", "bool", "int8", "uint8", "int16", *COMPLEX)},
    "float8": FLOAT8,
}
_REDUCTIONS = {"avg": ("AVG",), "product": ("PRODUCT",), "bitwise": BITWISE, "premul_sum": ("PREMUL_SUM",)}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for capability, requirement, cells in _cells():
        yield from _grid.cells(requirement, cells, 2, 3, undeclared=capability)
    for capability in CALLS:
        yield from _grid(
            "REFUSE-04",
            dashed(capability),
            "undeclared_call",
            3,
            arguments={"capability": f"call of {capability}", "undeclared": [capability]},
            deadline_s=15.0,
        )


def _cells() -> Iterator[tuple[str, str, list[Cell]]]:
    """Yield each capability that circumstances of an operation need, the requirement about it, and its cells."""
    for capability, dtypes in _DTYPES.items():
        yield capability, "REFUSE-01", every_cell(OPERATIONS, dtypes, root=1, path=("public", "group"))
    for capability, reductions in _REDUCTIONS.items():
        dtypes = ("int64",) if capability == "bitwise" else ("float32", "float64")
        yield capability, "REFUSE-02", every_cell(REDUCING, dtypes, op=reductions, root=1, path=("public", "group"))
    for capability in sorted({operation.needs for operation in OPERATIONS.values()} - {""}):
        named = [operation.name for operation in OPERATIONS.values() if operation.needs == capability]
        yield capability, "REFUSE-03", every_cell(named, ("float32", "int64"), root=1, path=("public", "group"))
    yield "in_place", "REFUSE-03", every_cell(OPERATIONS, ("float32",), root=1, in_place=True)
