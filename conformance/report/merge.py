"""Puts the reports of a run's shards together."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from conformance.checkers.explanation import some
from conformance.errors import ReportError
from conformance.run.report import Assignment, Report


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """The report of all shards, and the ids of scenarios that none of them ran."""

    report: Report
    missing: tuple[str, ...]


def merge(reports: Sequence[Report]) -> Merged:
    """Return one report of what several ran. With scenarios missing it is incomplete, and therefore not green.

    Raises:
        ReportError: fewer than two reports, a scenario is in more than one of them (which verdict counts?), or they
            judge different subjects, backends, torch versions or selections; or two of them compare step times.

    """
    if len(reports) < 2:
        raise ReportError(f"merging takes at least two reports, got {len(reports)}")
    first = reports[0]
    for number, report in enumerate(reports[1:], start=2):
        check_alike(first, report, f"reports 1 and {number}")
    times = Counter(scenario.id for report in reports for scenario in report.scenarios)
    if repeated := [scenario_id for scenario_id, count in times.items() if count > 1]:
        raise ReportError(
            f"{len(repeated)} scenario(s) are in more than one report: {some(repeated)};"
            " each must come from one shard, for it has one verdict"
        )
    if len(measured := [str(n) for n, report in enumerate(reports, start=1) if report.performance]) > 1:
        raise ReportError(
            f"reports {' and '.join(measured)} both compare step times, and one answer is wanted; measure in one shard"
        )
    by_id = {scenario.id: scenario for report in reports for scenario in report.scenarios}
    selected = first.selection.ids or tuple(by_id)
    if strangers := sorted(by_id.keys() - set(selected)):
        raise ReportError(f"{len(strangers)} scenario(s) were never selected: {some(strangers)}")
    missing = tuple(scenario_id for scenario_id in selected if scenario_id not in by_id)
    scenarios = tuple(by_id[scenario_id] for scenario_id in selected if scenario_id in by_id)
    known = {requirement.id: requirement for report in reports for requirement in report.requirements}
    chapters = list(dict.fromkeys(name for report in reports for name in report.chapters))
    merged = Report.of(
        scenarios,
        sorted(known.values(), key=lambda one: chapters.index(one.chapter)),
        subject=first.subject,
        backend=first.backend,
        num_selected=max(len(selected), sum(report.totals.selected for report in reports)),
        interrupted=any(report.interrupted for report in reports),
        environment=first.environment,
        duration_s=sum(report.duration_s for report in reports),
        selection=_whole([report.selection for report in reports]),
        performance=tuple(ratio for report in reports for ratio in report.performance),
    )
    # Machines differ in speed: there is no median of all.
    merged = dataclasses.replace(merged, specification=first.specification, median_warm_scenario_ms={})
    return Merged(merged, missing)


def _whole(parts: Sequence[Assignment]) -> Assignment:
    """Return the selection of all shards together; it has an order only if all shards have the same."""
    whole = dataclasses.replace(parts[0], shard="")
    same = all((part.order, part.seed) == (whole.order, whole.seed) for part in parts)
    return whole if same else dataclasses.replace(whole, order="", seed=0)


def check_alike(first: Report, other: Report, both: str) -> None:
    """Raise `ReportError`, about `both`, unless two reports judge the same and may be one."""
    for name, left, right in (
        ("subject", first.subject.target, other.subject.target),
        ("backend", first.backend, other.backend),
        ("torch", first.package_version("torch"), other.package_version("torch")),
        ("ddp-conformance", first.package_version("ddp-conformance"), other.package_version("ddp-conformance")),
        ("profile", first.selection.profile, other.selection.profile),
        ("specification", first.specification, other.specification),
    ):
        if left != right:
            raise ReportError(f"{both} differ in {name}: {left or 'none'} and {right or 'none'}")
    if first.selection.ids != other.selection.ids:
        raise ReportError(f"{both} are not of one run: their selections differ")
    if first.certified or other.certified:
        raise ReportError("a certified report is one whole run; it cannot be merged")
