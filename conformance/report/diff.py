"""What changed between two reports, scenario by scenario."""

from dataclasses import dataclass

from conformance.bench.ratio import changes
from conformance.checkers.explanation import counted
from conformance.errors import present
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Change:
    """One scenario whose verdict differs; `before` or `after` is None where a report lacks it."""

    id: str
    before: Verdict | None
    after: Verdict | None
    summary: str = ""

    def __str__(self) -> str:
        """Return e.g. `PASS -> FAIL  buckets/BUCKET-03/mlp`."""
        names = [verdict.value if verdict is not None else "absent" for verdict in (self.before, self.after)]
        return f"{' -> '.join(names)}  {self.id}" + (f"  {self.summary}" if self.summary else "")


@dataclass(frozen=True, slots=True)
class ReportDiff:
    """Two reports compared; only `regressed` is bad news for certain.

    `changed` went from one failure or missing statement to another. `capability` ran on one side only, because a
    capability was declared or is declared no longer. `redefined` has kept its id, but is another scenario now, so its
    verdicts cannot be compared. `native` are the changes of torch's DDP beside the subject. `num_both` scenarios are in
    both reports. `circumstances` says in what else the reports differ.
    """

    regressed: tuple[Change, ...]
    fixed: tuple[Change, ...]
    changed: tuple[Change, ...]
    capability: tuple[Change, ...]
    new: tuple[Change, ...]
    vanished: tuple[Change, ...]
    redefined: tuple[str, ...]
    circumstances: tuple[str, ...]
    native: tuple[Change, ...] = ()
    num_both: int = 0

    @property
    def groups(self) -> tuple[tuple[str, tuple[Change, ...]], ...]:
        """Each kind of change with its name, the gravest first."""
        return (
            ("regressed", self.regressed),
            ("changed", self.changed),
            ("capability changed", self.capability),
            ("fixed", self.fixed),
            ("torch's DDP", self.native),
        )


def compare(before: Report, after: Report) -> ReportDiff:
    """Return what changed from `before` to `after`, in the scenarios that both have, and what only one has."""
    old = {scenario.id: scenario for scenario in before.scenarios}
    new = {scenario.id: scenario for scenario in after.scenarios}
    groups: dict[str, list[Change]] = {"regressed": [], "fixed": [], "changed": [], "capability": []}
    redefined = []
    for scenario_id in old.keys() & new.keys():
        left, right = old[scenario_id], new[scenario_id]
        if left.sha256 != right.sha256:
            redefined.append(scenario_id)
        if kind := _kind(left.subject.verdict, right.subject.verdict):
            groups[kind].append(_change(left, right))
    return ReportDiff(
        **{kind: tuple(sorted(changes, key=lambda change: change.id)) for kind, changes in groups.items()},
        new=tuple(_change(None, new[id_]) for id_ in sorted(new.keys() - old.keys())),
        vanished=tuple(_change(old[id_], None) for id_ in sorted(old.keys() - new.keys())),
        redefined=tuple(sorted(redefined)),
        circumstances=_circumstances(before, after),
        native=tuple(filter(None, (_native_change(old[id_], new[id_]) for id_ in sorted(old.keys() & new.keys())))),
        num_both=len(old.keys() & new.keys()),
    )


def difference_lines(difference: ReportDiff, *, most: int | None = None, verbose: bool = False) -> list[str]:
    """Return the difference as lines of text, with `most` changes of each kind.

    `verbose` also lists the scenarios that only one of the reports has.
    """
    lines = [*difference.circumstances]
    for name, group in difference.groups:
        if group:
            lines += ["", f"{name}: {len(group)}", *(f"  {change}" for change in group[:most])]
        if most is not None and len(group) > most:
            lines.append(f"  and {len(group) - most} more")
    if difference.redefined:
        lines += ["", f"not the same scenario under the same id: {len(difference.redefined)}"]
        lines += [f"  {scenario_id}" for scenario_id in difference.redefined[:most]]
    if not any(group for _, group in difference.groups):
        lines.append(f"No verdict changed in the {counted(difference.num_both, 'scenario')} of both reports.")
    for name, only in (("before", difference.vanished), ("after", difference.new)):
        if only:
            lines += ["", f"only in the report {name}: {len(only)}"]
        lines += [f"  {change}" for change in only if verbose]
    return lines


def _native_change(before: Outcome, after: Outcome) -> Change | None:
    left, right = before.native, after.native
    if left is None or right is None or left.verdict is right.verdict:
        return None
    return Change(after.id, left.verdict, right.verdict, right.summary if right.verdict is not Verdict.PASS else "")


def _kind(before: Verdict, after: Verdict) -> str:
    if before is after:
        return ""
    if Verdict.UNSUPPORTED in (before, after):
        return "regressed" if after.is_failure else "capability"
    if before is Verdict.PASS or (after.is_failure and not before.is_failure):
        return "regressed"
    return "fixed" if after is Verdict.PASS else "changed"


def _change(before: Outcome | None, after: Outcome | None) -> Change:
    either = present(after or before)
    return Change(
        either.id,
        before.subject.verdict if before is not None else None,
        after.subject.verdict if after is not None else None,
        after.subject.summary if after is not None and after.subject.verdict is not Verdict.PASS else "",
    )


def _circumstances(before: Report, after: Report) -> tuple[str, ...]:
    packages = sorted({name for report in (before, after) for name in _packages(report)})
    named = [
        ("subject", before.subject.name, after.subject.name),
        ("backend", before.backend, after.backend),
        *((name, before.package_version(name), after.package_version(name)) for name in packages),
        ("specification", before.specification, after.specification),
        ("order", before.selection.arranged, after.selection.arranged),
        ("complete", str(before.is_complete), str(after.is_complete)),
    ]
    differing = (f"{name}: {left or 'none'} -> {right or 'none'}" for name, left, right in named if left != right)
    return (*differing, *changes(before.performance, after.performance))


def _packages(report: Report) -> list[str]:
    packages = report.environment.get("packages")
    return list(packages) if isinstance(packages, dict) else []
