"""The outcomes of a run that ended early, for another run that continues it."""

from collections.abc import Iterable
from pathlib import Path

from conformance.errors import ReportError
from conformance.report.merge import check_alike
from conformance.report.read import read_report
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.verdict import Verdict


def found_before(folder: Path, begun: Report, scenarios: Iterable[Scenario]) -> tuple[Outcome, ...]:
    """Return what a run that ended early found of these scenarios, but for errors of the harness.

    Raises:
        ReportError: there is no such run in `folder`, or it judged something else.

    """
    before = read_report(folder)
    if before.is_complete:
        raise ReportError(f"the report in {folder} is complete; nothing is left to resume")
    check_alike(before, begun, f"this run and that in {folder}")
    digests = {one.id: one.digest for one in scenarios}
    return tuple(
        one
        for one in before.scenarios
        if digests.get(one.id) == one.sha256 and all(each.verdict is not Verdict.HARNESS_ERROR for each in one.results)
    )
