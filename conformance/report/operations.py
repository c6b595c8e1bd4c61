"""The matrix of a backend: what was tried of each operation, by axis, and with which values something was wrong."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from conformance.run.outcome import Outcome
from conformance.verdict import Verdict

#: The axes in the order of the columns; others stand behind them.
_AXES = (
    "dtype", "op", "numel", "form", "reads", "writes", "in_place", "root", "group", "ranks", "path", "lifetime",
    "neighbour", "data", "peer", "fate", "calling", "whose",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """One value of an axis: in how many cells an operation was tried with it, and in how many of them it was wrong.

    `known` are the wrong cells of scenarios that failed as the baseline, or a file of known failures, says.
    """

    name: str
    cells: int
    wrong: int
    known: int = 0

    @property
    def share(self) -> float:
        """The part of its cells that were wrong."""
        return self.wrong / max(self.cells, 1)

    @property
    def verdict(self) -> Verdict:
        """FAIL where every cell was wrong, UNKNOWN where some were: then another axis may be to blame.

        UNSUPPORTED where all that is wrong was known.
        """
        if self.wrong == self.known:
            return Verdict.UNSUPPORTED if self.known else Verdict.PASS
        return Verdict.FAIL if self.wrong == self.cells else Verdict.UNKNOWN

    def __str__(self) -> str:
        """Return e.g. `polled 8/8`, or `polled 8/8 known`."""
        known = "" if not self.known else " known" if self.known == self.wrong else f" {self.known} known"
        return f"{self.name} {self.wrong}/{self.cells}{known}".strip()


@dataclass(frozen=True, slots=True)
class AxisOfOperation:
    """What an operation was tried with on one axis: the values that are suspect, the worst first, and the others.

    A value is suspect if a larger part of its cells was wrong than of all cells of the operation.
    """

    suspect: tuple[Value, ...]
    others: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class OperationRow:
    """One operation: all its cells, and those of each axis."""

    operation: str
    total: Value
    axes: tuple[AxisOfOperation, ...]


@dataclass(frozen=True, slots=True)
class OperationMatrix:
    """A row for each operation and a column for each axis; no rows where no operation was tried by itself."""

    axes: tuple[str, ...]
    rows: tuple[OperationRow, ...]


def operation_matrix(outcomes: Iterable[Outcome]) -> OperationMatrix:
    """Return what `outcomes` tried, all together; the operation with most wrong cells first."""
    cells: dict[str, Counter[str]] = {}
    wrong: dict[str, Counter[str]] = {}
    known: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for operation, counts in outcome.tried.items():
            for name, (tried, found) in counts.items():
                cells.setdefault(operation, Counter())[name] += tried
                wrong.setdefault(operation, Counter())[name] += found
                known.setdefault(operation, Counter())[name] += found * outcome.is_excused
    there = {name.partition(" ")[0] for counts in cells.values() for name in counts if name}
    axes = (*(axis for axis in _AXES if axis in there), *sorted(there - set(_AXES)))
    rows = [_row(operation, axes, cells[operation], wrong[operation], known[operation]) for operation in cells]
    return OperationMatrix(axes, tuple(sorted(rows, key=lambda row: (-row.total.wrong, row.operation))))


def _row(
    operation: str, axes: Iterable[str], cells: Counter[str], wrong: Counter[str], known: Counter[str]
) -> OperationRow:
    by_axis: dict[str, list[Value]] = {}
    for name, count in cells.items():
        axis, _, value = name.partition(" ")
        by_axis.setdefault(axis, []).append(Value(value, count, wrong[name], known[name]))
    total = Value("", cells[""], wrong[""], known[""])
    return OperationRow(operation, total, tuple(_of_axis(by_axis.get(axis, []), total) for axis in axes))


def _of_axis(values: Iterable[Value], total: Value) -> AxisOfOperation:
    ordered = sorted(values, key=lambda one: (-one.share, one.name))
    return AxisOfOperation(
        tuple(one for one in ordered if one.share > total.share),
        tuple(one for one in ordered if one.share <= total.share),
    )
