"""Counts which operations of a backend a scenario tried, and how many were wrong, for the matrix of a page."""

from collections import Counter
from collections.abc import Iterator, Mapping

from conformance.observation import Observation
from conformance.programs.operation_cells import UNDECLARED, cells_of, operation_cells
from conformance.programs.operations.cell import Cell
from conformance.run.outcome import Tried
from conformance.scenario import Scenario
from conformance.verdict import Verdict


def tried_in(scenario: Scenario, observations: Mapping[int, Observation], verdict: Verdict) -> Tried:
    """Return the counts of a scenario; empty if it is about no operation, or did not run."""
    tried: dict[str, Counter[str]] = {}
    wrong: dict[str, Counter[str]] = {}
    for operation, values, is_wrong in _cells(scenario, observations, verdict):
        names = ["", *(f"{axis} {value}" for axis, value in values.items()), f"ranks {scenario.world_size}"]
        tried.setdefault(operation, Counter()).update(names)
        wrong.setdefault(operation, Counter()).update(names if is_wrong else ())
    return {
        operation: {name: (count, wrong[operation][name]) for name, count in counts.items()}
        for operation, counts in tried.items()
    }


def _cells(
    scenario: Scenario, observations: Mapping[int, Observation], verdict: Verdict
) -> Iterator[tuple[str, Mapping[str, str], bool]]:
    """Yield the operation of each cell that ran, its values on the axes, and whether it was wrong on some rank."""
    if not observations or verdict is Verdict.UNSUPPORTED:
        return
    for cell in cells_of(scenario) if scenario.program == operation_cells.name else ():
        name = cell.describe()
        clauses = [seen.facts[name] for seen in observations.values() if name in seen.facts]
        if clauses and set(clauses) <= {UNDECLARED}:
            continue
        never_ended = any(seen.phase == name and seen.fate.kind != "returned" for seen in observations.values())
        if clauses or never_ended:
            yield cell.operation, _values(cell), never_ended or any(clauses)
    if isinstance(operation := scenario.arguments.get("operation"), str):
        texts = {axis: value for axis, value in scenario.arguments.items() if isinstance(value, str)}
        del texts["operation"]
        yield operation, {axis: _dashed(value) for axis, value in texts.items()}, verdict.is_failure


def _values(cell: Cell) -> Mapping[str, str]:
    given = {**cell.to_json(), "dtype": cell.dtype, "op": cell.reduction}
    shown = {axis: "yes" if value is True else _dashed(str(value)) for axis, value in given.items() if value != ""}
    return {axis: value for axis, value in shown.items() if axis != "operation"}


def _dashed(value: str) -> str:
    return value.replace(" ", "-")
