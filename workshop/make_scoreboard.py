"""`python -m workshop scoreboard`: makes one table of several subjects' reports."""

import datetime
from pathlib import Path

import click

from conformance.cli.options import NamedPath
from conformance.errors import ReportError
from conformance.report.read import read_report
from workshop.scoreboard import inserted, scoreboard

_FILE = NamedPath()


@click.command("scoreboard", short_help="Make a table of several subjects.")
@click.argument("reports", type=_FILE, nargs=-1, required=True)
@click.option("--into", type=_FILE, metavar="FILE", help="Replace the table between the markers in FILE.")
@click.option("--date", default="", metavar="YYYY-MM-DD", help="The date printed above the table.  [default: today]")
def command(reports: tuple[Path, ...], into: Path | None, date: str) -> None:
    """Make a Markdown table: how many requirements of each chapter several DDPs, or backends by themselves, keep.

    REPORTS must hold the same scenarios, on the same torch, and DDPs on the same backend, each for a different subject.
    """
    from conformance.subjects.others import DISTRIBUTIONS

    try:
        when = datetime.date.fromisoformat(date) if date else datetime.datetime.now(datetime.UTC).date()
    except ValueError as error:
        raise ReportError(f"--date must be a date such as 2027-06-30, got {date!r}") from error
    packages = {"ddp_impl": "ddp-conformance", **DISTRIBUTIONS}
    read = [read_report(report) for report in reports]
    board = scoreboard(read, packages, when)
    if into is None:
        click.echo(board, nl=False)
        return
    try:
        page = into.read_text(encoding="utf-8")
        into.write_text(inserted(page, board, of_backends=read[0].is_about_backend), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot rewrite {into}: {error.strerror}") from error
