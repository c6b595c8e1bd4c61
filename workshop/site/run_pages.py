"""The page that shows verdicts of runs, made from the newest stored reports and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from conformance.report.results import Stored
from conformance.run.report import Report
from conformance.scenario import Scenario
from workshop.behaviour_rows import load_behaviours
from workshop.behaviours import behaviours_page

#: The DDP that it is about; torch's stands beside it in its reports.
SHOWN = "ddp_impl"


def run_pages(stored: Sequence[Stored], scenarios: Sequence[Scenario]) -> Mapping[str, str]:
    """Return the page of behaviours in Markdown, with how many of this release's `scenarios` about it are stored.

    `stored` is ordered by date.
    """
    reports = [report for report in newest(stored) if report.subject.name == SHOWN]
    rows = load_behaviours()
    named = {name for row in rows for name in row.requirements}
    wanted = [one.id for one in scenarios if named & set(one.requirements)]
    return {"behaviours.md": f"{behaviours_page(rows, reports)}\n{_covered(reports, wanted)}\n"}


def newest(stored: Sequence[Stored]) -> tuple[Report, ...]:
    """Return the last report of each DDP on each backend at each profile, of those on the newest run's torch.

    The newest comes first.
    """
    if not stored:
        return ()
    torch = stored[-1].report.package_version("torch")
    same = [one for one in stored if one.report.package_version("torch") == torch]
    last = {(one.name, one.report.selection.profile): one for one in same}
    return tuple(one.report for one in reversed(same) if last[one.name, one.report.selection.profile] is one)


def _covered(reports: Iterable[Report], wanted: Sequence[str]) -> str:
    there = {one.id for report in reports for one in report.scenarios}
    held = sum(one in there for one in wanted)
    return (
        f"The stored runs hold {held:,} of the {len(wanted):,} scenarios that this page is about."
        " `KEY=key.pem bash ci/store.sh` runs all of them and stores the reports."
    )
