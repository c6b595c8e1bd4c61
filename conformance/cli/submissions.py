"""`ddp-conformance report accept` and `report check`: take a report into `results/`, and check what lies there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from conformance.checkers.explanation import counted
from conformance.cli.options import NamedPath
from conformance.errors import ReportError
from conformance.report.console import say

if TYPE_CHECKING:
    from conformance.report.submission import Suite

_FOLDER = NamedPath(file_okay=False)


@click.command()
@click.argument("report", type=NamedPath())
@click.option("--into", type=_FOLDER, default=Path("results"), show_default=True, help="Where reports are stored.")
@click.option("--unsigned", is_flag=True, help="Take a report that nobody has signed, because you ran it yourself.")
@click.option("--new-key", is_flag=True, help="Take another key than that of the subject's stored reports.")
def accept(report: Path, into: Path, unsigned: bool, new_key: bool) -> None:
    """Check the signed REPORT of a run, and store it where `report site` finds it.

    Its scenarios and requirements must be those of this release, all that its profile has, or all of each requirement
    that it speaks of. A report in which a DDP fails is as welcome as another. Exits with 2 when it is refused, and then
    changes nothing.
    """
    from conformance.report.submission import accept as accept_report

    place = accept_report(report, into, suite(), unsigned=unsigned, new_key=new_key)
    say(f"Accepted: {place}. Commit it; `ddp-conformance report check {into}` checks all that is stored.")


@click.command()
@click.argument("results", type=_FOLDER)
@click.option("--since", type=_FOLDER, metavar="FOLDER", help="The stored reports as they were: they may not change.")
@click.option("--unsigned", is_flag=True, help="Some of them are your own, and nobody has signed them.")
def check(results: Path, since: Path | None, unsigned: bool) -> None:
    """Check every report stored below RESULTS: its place, its signature, and that it agrees with itself.

    With --since, what is new must be as `accept` wants it, and signed by the key of the subject's stored reports if it
    has any. Exits with 2 when anything is wrong.
    """
    from conformance.report.submission import check as check_reports

    if not results.is_dir():
        raise ReportError(f"{results} is no folder of stored reports")
    if wrong := check_reports(results, suite(), since, unsigned=unsigned):
        raise ReportError(f"{counted(len(wrong), 'complaint')} about {results}: " + "; ".join(wrong))
    say(f"{counted(len(list(results.rglob('report.json*'))), 'stored report')}, nothing wrong.")


def suite() -> Suite:
    """Return the requirements and scenarios of this release."""
    from conformance.report.submission import Suite
    from conformance.spec.catalogue import load_catalogue
    from conformance.suite import load_scenarios

    return Suite(load_catalogue(), load_scenarios())
