"""`ddp-conformance report`: what can be made of a finished report, without running anything."""

import datetime
import json
import sys
from pathlib import Path

import click

from conformance.checkers.explanation import counted
from conformance.cli import EXIT_FAILED
from conformance.cli.options import NamedPath
from conformance.cli.submissions import accept, check
from conformance.cli.verify import command as verify
from conformance.errors import ReportError
from conformance.report.console import printable, say
from conformance.report.folder import begins_as_report, is_report, report_text
from conformance.report.plain_file import write_plain
from conformance.report.read import read_report

_EXISTING = NamedPath()
_OUT = click.option("--out", "-o", type=_EXISTING, metavar="FILE", help="Write to FILE.  [default: standard output]")
_REPORT = click.argument("report", type=_EXISTING)


@click.group("report")
def command() -> None:
    """Make pages of a finished report, merge or compare reports, and check them.

    REPORT is a report.json or the folder that holds one. Nothing is run, and nothing that a report holds is executed.

    \b
    ddp-conformance report summary report                  what `run` printed at its end
    ddp-conformance report html report -o report.html      one page to look at, without a network
    ddp-conformance report junit report -o junit.xml       for a CI system
    ddp-conformance report markdown report                 for a pull request comment
    ddp-conformance report trace report -o trace.json      collectives of failures, for ui.perfetto.dev
    ddp-conformance report plain report | jq .scenarios    for programs: JSON in which nothing is shared
    ddp-conformance report merge a/report.json b/report.json -o report.json
    ddp-conformance report diff last-night report
    ddp-conformance report accept report --into results    store a signed report of this or another project
    ddp-conformance report check results                   are all stored reports what was signed?
    ddp-conformance report site results -o pages           a page per DDP and backend, with their history
    """


@command.command()
@_REPORT
@click.option("--verbose", "-v", is_flag=True, help="Print every requirement, and the evidence of all that failed.")
def summary(report: Path, verbose: bool) -> None:
    """Print a finished report again, as `run` does at its end."""
    from conformance.report.console import make_console
    from conformance.report.terminal import print_report
    from conformance.spec.catalogue import load_catalogue

    folder = report if report.is_dir() else report.parent
    print_report(make_console(), read_report(report), load_catalogue(), folder, verbose=verbose)


@command.command()
@click.argument("reports", type=_EXISTING, nargs=-1, required=True)
@_OUT
def html(reports: tuple[Path, ...], out: Path | None) -> None:
    """Make one HTML page: matrix, filters, failures with timelines.

    The page needs no other file and no network. With several REPORTS every subject gets a column.
    """
    from conformance.report.html import html_page

    folders = [report if report.is_dir() else report.parent for report in reports]
    _write(html_page([read_report(report) for report in reports], folders), out)


@command.command()
@_REPORT
@_OUT
def junit(report: Path, out: Path | None) -> None:
    """Make JUnit XML: one suite per chapter, one case per scenario."""
    from conformance.report.junit import junit_xml

    _write(junit_xml(read_report(report)), out)


@command.command()
@_REPORT
@click.option("--last", type=_EXISTING, metavar="REPORT", help="Also say what has changed since this report.")
@_OUT
def markdown(report: Path, last: Path | None, out: Path | None) -> None:
    """Make Markdown for a comment below a pull request."""
    from conformance.report.markdown import markdown as markdown_text

    _write(markdown_text(read_report(report), read_report(last) if last is not None else None), out)


@command.command()
@_REPORT
@_OUT
def badge(report: Path, out: Path | None) -> None:
    """Draw an SVG badge with the answer."""
    from conformance.report.headline import badge_svg

    _write(badge_svg(read_report(report)), out)


@command.command()
@_REPORT
@_OUT
def trace(report: Path, out: Path | None) -> None:
    """Make a trace of the failures' collectives, all ranks, for ui.perfetto.dev."""
    from conformance.report.trace import trace_of

    _write(json.dumps(trace_of(read_report(report))) + "\n", out)


@command.command()
@_REPORT
@_OUT
def plain(report: Path, out: Path | None) -> None:
    """Write a report that may be compressed as JSON, a line for each scenario.

    Its JSON Schema: `python -m conformance.report.schema`.
    """
    _write(report_text(read_report(report)), out)


@command.command()
@click.argument("reports", type=_EXISTING, nargs=-1, required=True)
@_OUT
def merge(reports: tuple[Path, ...], out: Path | None) -> None:
    """Put the reports of a run's shards together.

    A scenario in two reports is an error. Scenarios in none of them are listed; the merged report is then incomplete,
    and the exit code 1. With `--out FOLDER/report.json` the folder gets the scenarios that failed too, for `replay`.
    """
    from conformance.report.folder import write_report
    from conformance.report.merge import merge as merge_reports
    from conformance.spec.catalogue import load_catalogue

    merged = merge_reports([read_report(path) for path in reports])
    if out is not None and out.name == "report.json":
        write_report(merged.report, load_catalogue(), out.parent)
    else:
        _write(report_text(merged.report), out)
    for scenario_id in merged.missing:
        say(f"missing  {scenario_id}", err=True)
    if merged.missing:
        selected = merged.report.totals.selected
        say(f"{len(merged.missing)} of {counted(selected, 'scenario')} are in none of the reports.", err=True)
        click.get_current_context().exit(EXIT_FAILED)


@command.command()
@click.argument("folders", type=_EXISTING, nargs=-1, required=True)
@click.option("--out", "-o", type=_EXISTING, required=True, metavar="FOLDER", help="Where the pages are written.")
def site(folders: tuple[Path, ...], out: Path) -> None:
    """Make pages of the results in FOLDERS over time: Markdown, and a badge per DDP and backend.

    Every report.json at any depth is read. Its date is that of its run; of an older report, which has none, that in its
    path, such as results/2026-11-21/report.json.
    """
    from conformance.report.results import results_pages, stored_reports

    pages = results_pages(stored_reports(folders))
    try:
        for name, text in pages.items():
            file = out / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write_plain(file, text)
    except OSError as error:
        raise ReportError(f"cannot write pages to {out}: {error.strerror}") from error
    say(f"{counted(len(pages), 'file')} in {out}.")


@command.command()
@click.argument("before", type=_EXISTING)
@click.argument("after", type=_EXISTING)
@click.option("--again", type=_EXISTING, metavar="REPORT", help="Another run of BEFORE's files: what varies by itself.")
@click.option("--verbose", "-v", is_flag=True, help="List the scenarios that only one of the reports has.")
def diff(before: Path, after: Path, again: Path | None, verbose: bool) -> None:
    """Say what changed between two reports, in the scenarios that both have; exit with 1 when something regressed.

    Where both runs kept histories, also which collectives, errors and warnings came or went, whatever the verdicts.
    """
    from conformance.report.diff import compare, difference_lines
    from conformance.report.histories import history_lines, read_histories

    reports = {folder: read_report(folder) for folder in (before, after)}
    difference = compare(reports[before], reports[after])
    if not difference.num_both:
        empty = [f"{folder} holds no outcome" for folder, report in reports.items() if not report.scenarios]
        why = empty[0] if empty else f"{before} and {after} have no scenario in common"
        raise ReportError(f"{why}: nothing can be compared")
    left, right, third = read_histories(before), read_histories(after), read_histories(again) if again else None
    if again and third is None:
        raise ReportError(f"{again} has no histories; run with --keep-histories")
    histories = history_lines(left, right, third) if left is not None and right is not None else []
    for line in (*difference_lines(difference, verbose=verbose), *histories):
        say(line)
    if difference.regressed:
        click.get_current_context().exit(EXIT_FAILED)


@command.command()
@_REPORT
@click.option(
    "--update-expectations", "file", type=_EXISTING, required=True, metavar="FILE", help="Rewrite FILE, or create it."
)
@click.option("--reason", default="", help="For failures that FILE does not know yet.")
@click.option("--issue", default="", help="Where they are discussed.")
@click.option("--expires", default="", metavar="YYYY-MM-DD", help="The last day on which they are excused.")
def expectations(report: Path, file: Path, reason: str, issue: str, expires: str) -> None:
    """Bring an expectations file up to what a report shows.

    Entries that the report contradicts are narrowed down or removed, failures that no entry covers are added, with the
    given reason, issue and expiry. Entries whose conditions do not hold for the report's subject, backend or torch are
    left alone. Comments in FILE are not kept; look at the difference before you commit it.
    """
    from conformance.cli.known_failures import circumstances_of, read_file
    from conformance.run.known_failures import KnownFailure, known_failures_to_toml, updated
    from conformance.suite import load_scenarios
    from conformance.verdict import Verdict

    read = read_report(report)
    known = read_file(file) if file.exists() else ()
    added: list[str] = []

    def new(scenario_id: str, verdict: Verdict) -> KnownFailure:
        if not (reason and issue and expires):
            raise ReportError(
                f"{scenario_id} came to {verdict.value} and no entry of {file} expects it;"
                " say --reason, --issue and --expires for it"
            )
        added.append(scenario_id)
        return KnownFailure(
            scenario_id, verdict, reason, issue, _date(expires), subject=read.subject.name, backend=read.backend
        )

    world_sizes = {scenario.id: scenario.world_size for scenario in load_scenarios()}
    world_sizes |= {scenario.id: scenario.world_size for scenario in read.scenarios}
    verdicts = {scenario.id: scenario.subject.verdict for scenario in read.scenarios}
    entries = updated(known, circumstances_of(read), verdicts, world_sizes, new)
    _write(known_failures_to_toml(entries), file)
    say(f"{file}: {len(entries)} entries, {len(added)} of them new; there were {len(known)}.")


@command.command()
@click.argument("reports", type=_EXISTING, nargs=-1, required=True)
@click.option(
    "--onto", type=NamedPath(exists=True, dir_okay=False), metavar="FILE",
    help="Also what this baseline has: torch's DDP does not break the same every night.",
)  # fmt: skip
@_OUT
def baseline(reports: tuple[Path, ...], onto: Path | None, out: Path | None) -> None:
    """Write down what torch's own DDP breaks in REPORTS, by requirement, for `run --expectations FILE`.

    The reports are of one torch over one backend; torch's DDP is their subject, or ran beside it. A scenario in which
    it broke in any of them is in the baseline; one that has changed since is not.
    """
    from conformance.run.baseline import baseline_of, baseline_to_toml, read_baseline, union
    from conformance.spec.catalogue import load_catalogue
    from conformance.suite import load_scenarios

    digests = {scenario.id: scenario.digest for scenario in load_scenarios()}
    read, catalogue = [read_report(report) for report in reports], load_catalogue()
    made = baseline_of(read, catalogue, digests)
    if onto is not None:
        made = union(read_baseline(onto.read_text(encoding="utf-8")), made, catalogue, digests)
    _write(baseline_to_toml(made), out)
    seen = {one.id for report in read for one in report.scenarios if digests.get(one.id) == one.sha256}
    say(f"{len(seen)} of the {len(digests)} scenarios of this release are in the reports.", err=True)


for _one in (verify, accept, check):
    command.add_command(_one)


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ReportError(f"--expires must be a date such as 2027-06-30, got {text!r}") from error


def _write(text: str, out: Path | None) -> None:
    if out is None:
        click.echo(printable(text, lines=True) if sys.stdout.isatty() else text, nl=False)
        return
    if is_report(out) and not begins_as_report(text):
        raise ReportError(f"{out} is a report, whose data would be lost; choose another name for --out")
    write_plain(out, text)
