"""What a person sees of a run: a bar and failures while it lasts, then the failures, the chapters and the totals."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from rich import progress as bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.bench.curve import Curve
from conformance.bench.ratio import Ratio, overheads
from conformance.checkers.explanation import counted, shorten, some
from conformance.checkers.unconnected import TRIED_AGAIN
from conformance.report.blame import blamed
from conformance.report.causes import Cause, Kind, causes_of
from conformance.report.failure import failure_path, failure_text, replay_command
from conformance.report.groups import all_groups, groups_of
from conformance.report.headline import kept
from conformance.run.outcome import (
    Outcome,
    Progress,
    combine,
    combined_text,
    counts_text,
    evidence_on,
    reasons_unsupported,
    subjects_text,
    verdicts_of,
)
from conformance.run.patience import HANGS_IN_A_ROW, SHORT_DEADLINE_S, hangs_after
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue
from conformance.spec.cheapest import work
from conformance.verdict import Verdict

STYLES = {
    Verdict.PASS: "green",
    Verdict.UNSUPPORTED: "dim",
    Verdict.UNKNOWN: "yellow",
    Verdict.FAIL: "red",
    Verdict.HANG: "magenta",
    Verdict.CRASH: "bold red",
    Verdict.HARNESS_ERROR: "bold white on red",
}

#: So many causes of failures are shown with their evidence at the end of a run.
NUM_WHOLE = 3
_EVIDENCE_INDENT = 6  # that of the lines below `Let   A = ...`
#: Sentences are broken after so many columns off a terminal, in a CI log say; paths and commands are not.
_WIDTH_OF_LOGS = 100
_NUM_REASONS = 5  # why scenarios were UNSUPPORTED
_WIDTH_OF_NAME = 40  # of the scenario that runs, beside the bar
_IN_BAR, _IN_LINE = 1, 4  # names of requirements that failed: a bar must fit into 100 columns

#: Off a terminal, at least so much time passes between two lines about the progress of a run.
SECONDS_BETWEEN_LINES = 15.0


class ProgressBar:
    """A bar over the scenarios of a run, to be passed to the runner as `on_event`.

    The remaining time is what the scenarios so far took per unit of work, times the work left. Work is counted in
    forward passes over all ranks, because four ranks training for fifty steps are not one rank taking one. Off a
    terminal, in a CI log say, there is a line now and then instead, on standard error. The first failure of each
    requirement gets a line at once.
    """

    def __init__(self, console: Console, scenarios: tuple[Scenario, ...], *, quiet: bool = False) -> None:
        """Prepare a bar; nothing is drawn before the first event, and nothing at all if `quiet`."""
        self._quiet = quiet
        self._runs = ""  # the scenario that began last
        self._lines = None if console.is_terminal else Console(stderr=True, highlight=False, soft_wrap=True)
        self._said = 0.0
        self._total = len(scenarios)
        self._work_left = sum(map(work, scenarios))
        self._work_done = 0
        self._started = 0.0
        self._hangs = 0  # in a row
        self._failed: Counter[str] = Counter()
        self._num_contaminated = 0
        self._progress = bar.Progress(
            bar.TextColumn("{task.description}"),
            bar.BarColumn(),
            bar.MofNCompleteColumn(),
            bar.TextColumn("{task.fields[verdicts]}"),
            bar.TimeElapsedColumn(),
            _Remaining(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=len(scenarios), verdicts="", left=None)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, event: Progress) -> None:
        """Move the bar on."""
        if self._quiet:
            return
        if event.outcome is None:
            self._runs = event.scenario.id
        self._started = self._started or time.monotonic()  # not before: starting the ranks says nothing of the rest
        if event.outcome is not None:
            self._note_failure(event.outcome)
            self._work_done += work(event.scenario)
            self._work_left -= work(event.scenario)
            left = (time.monotonic() - self._started) / self._work_done * self._work_left
            self._progress.update(self._task, left=left)
        self._progress.update(
            self._task,
            completed=event.done,
            description=shorten(self._runs, _WIDTH_OF_NAME),
            verdicts=f"[red]{self._failures(_IN_BAR)}[/]" if self._failed or self._num_contaminated else "",
        )
        self._said = self._said or self._started
        if self._lines is not None and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self._lines.print(self._line(event.done))

    def _note_failure(self, outcome: Outcome) -> None:
        self._hangs, before = hangs_after(outcome, self._hangs), self._hangs
        if self._hangs == HANGS_IN_A_ROW != before:
            print_evidence(
                self._lines or self._progress.console,
                f"{HANGS_IN_A_ROW} scenarios in a row hung; the next ones get {SHORT_DEADLINE_S:g} s without progress,"
                " until one does not hang. --fail-fast ends a run at the first failure.",
            )
        self._num_contaminated += bool(outcome.contaminated_by)
        if not outcome.is_failure:
            return
        requirement = blamed(outcome)
        self._failed[requirement] += 1
        if self._failed[requirement] == 1:
            if self._lines is not None:
                self._lines.print(Text(_one_line(outcome)))
            else:
                self._progress.console.print(Text(_one_line(outcome)), no_wrap=True, overflow="ellipsis")

    def _failures(self, most: int) -> str:
        """Return e.g. `3 failed: BUFFER-01, GRAD-07, 1 contaminated`, with at most so many names."""
        contaminated = f", {self._num_contaminated} contaminated" if self._num_contaminated else ""
        if not self._failed:
            return f"0 failed{contaminated}"
        return f"{self._failed.total()} failed: {some([*self._failed], most)}{contaminated}"

    def _line(self, done: int) -> str:
        elapsed = time.monotonic() - self._started
        left = elapsed / max(self._work_done, 1) * self._work_left
        remaining = f", about {_clock(left)} left" if self._work_left else ""
        so_far = f"{done} of {counted(self._total, 'scenario')}"
        now = f"; now {self._runs}" if self._runs else ""
        return f"{so_far}, {self._failures(_IN_LINE)}, {_clock(elapsed)} elapsed{remaining}{now}"


class _Remaining(bar.ProgressColumn):
    def render(self, task: bar.Task) -> Text:
        left = task.fields["left"]
        if left is None or task.completed < 5:  # too little to extrapolate from
            return Text("")
        return Text(f"about {_clock(left)} left", style="cyan")


def _clock(seconds: float) -> str:
    return "{}:{:02d}".format(*divmod(round(seconds), 60))


def print_report(
    console: Console, report: Report, catalogue: Catalogue, folder: Path, *, verbose: bool = False, quiet: bool = False
) -> None:
    """Print failures, a line per chapter and totals; `folder` is where the report's files are.

    With `verbose` there is a line per requirement instead, and the evidence of every cause; with
    `quiet` there are no chapters.
    """
    if verbose:
        console.print(requirements_table(report, catalogue))
        console.print()
    print_failures(console, report, catalogue, folder, whole=len(report.failures) if verbose else NUM_WHOLE)
    if not verbose and not quiet:
        console.print(chapters_table(report, catalogue))
        console.print()
    if report.performance:
        console.print("Step time, as a ratio:")
        console.print(ratios_table(report.performance))
    print_totals(console, report, notes=verbose)


def chapters_table(report: Report, catalogue: Catalogue) -> Table:
    """Return the table with one row per chapter: requirements passed of those that apply, and scenarios' verdicts."""
    with_native = bool(report.native_verdicts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("chapter", no_wrap=True)
    table.add_column("passed", no_wrap=True)
    table.add_column("scenarios", justify="right")
    table.add_column(report.short_name)
    if with_native:
        table.add_column("torch's DDP")
    groups = {group.chapter: group for group in groups_of(report)}
    shown = [
        chapter.name for chapter in catalogue.chapters if any(one.chapter == chapter.name for one in report.scenarios)
    ]
    for chapter in shown:
        relevant = [outcome for outcome in report.scenarios if outcome.chapter == chapter]
        table.add_row(chapter, str(groups.get(chapter, "")), *_cells(relevant, with_native))
    if len(shown) > 1:
        table.add_row("all", str(all_groups(report)), *_cells(list(report.scenarios), with_native), style="bold")
    return table


def requirements_table(report: Report, catalogue: Catalogue) -> Table:
    """Return the table of verdicts: one row per chapter, and below it one per requirement."""
    with_native = bool(report.native_verdicts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("requirement", ratio=1)
    table.add_column("scenarios", justify="right")
    table.add_column(report.short_name, no_wrap=True)
    if with_native:
        table.add_column("torch's DDP", no_wrap=True)
    for chapter in catalogue.chapters:
        rows = [requirement for requirement in report.requirements if requirement.chapter == chapter.name]
        if not rows:
            continue
        if table.row_count:
            table.add_row()
        relevant = [outcome for outcome in report.scenarios if outcome.chapter == chapter.name]
        table.add_row(chapter.prefix, Text(chapter.title), *_cells(relevant, with_native), style="bold")
        for row in rows:
            relevant = evidence_on(row.id, report.scenarios)
            table.add_row(row.id, Text(row.statement), *_cells(relevant, with_native))
    return table


def _cells(outcomes: list[Outcome], with_native: bool) -> list[str | Text]:
    """Return how many scenarios there are, and what they say together in each column."""
    judged = combine(verdicts_of(one.subject for one in outcomes if not one.is_excused) or {Verdict.UNSUPPORTED: 1})
    cells: list[str | Text] = [str(len(outcomes)), Text(subjects_text(outcomes), style=STYLES[judged])]
    if with_native:
        cells.append(verdict_cell(verdicts_of(one.native for one in outcomes)))
    return cells


def verdict_cell(verdicts: Mapping[Verdict, int]) -> Text:
    """Return the combined verdict, with a count when not all scenarios agree."""
    return Text(combined_text(verdicts), style=STYLES[combine(verdicts)]) if verdicts else Text("-", style="dim")


def ratios_table(ratios: Iterable[Ratio]) -> Table:
    """Return the table of step times beside torch's DDP: below 1 the contestant is faster than the reference."""
    ratios = tuple(ratios)
    shares = overheads(ratios)
    table = Table("workload", "options", "compared with", "ranks", "median ratio", "quartiles", "overhead", "rounds")
    for one in ratios:
        quartiles = f"{one.lower:.3f} - {one.upper:.3f}"
        share = str(shares[one.compared]) if one.compared in shares else ""
        table.add_row(
            one.workload, one.variant, one.reference, str(one.world_size), f"{one.median:.3f}", quartiles, share,
            str(one.rounds),
        )  # fmt: skip
    return table


def growth_table(curves: Iterable[Curve]) -> Table:
    """Return the table of costs by size; the last column says with which power of the size they grew at the end."""
    table = Table("what costs", "contestant", "size", "cost: median and quartiles", "grows as")
    for curve in curves:
        for point in curve.points:
            is_first, is_last = point is curve.points[0], point is curve.points[-1]
            table.add_row(
                f"{curve.plot.title}, over {curve.plot.reference}" if is_first else "",
                curve.contestant if is_first else "",
                f"{point.size:,}",
                str(point),
                f"size^{curve.exponent:.2f}" if is_last else "",
                end_section=is_last,
            )
    return table


def print_failures(console: Console, report: Report, catalogue: Catalogue, folder: Path, *, whole: int) -> None:
    """Print why it failed, by cause, the one to look at first at the top: `whole` of them with their best evidence.

    Of the others there is one line each.
    """
    causes = causes_of(report)
    if causes:
        said = f"{counted(len(report.failures), 'failure')}, {counted(len(causes), 'cause')}:"
        console.print(said, style="bold", highlight=False)
    for number, cause in enumerate(causes[:whole], start=1):
        _print_cause(console, cause, number)
        replay = replay_command(cause.best.id, report.subject.typed, report.backend, folder)
        print_evidence(console, failure_text(cause.best, report.backend, catalogue, replay, title=cause.title))
        console.print()
    if not causes[whole:]:
        return
    for number, cause in enumerate(causes[whole:], start=whole + 1):
        _print_cause(console, cause, number)
    console.print(f"\nWhy: {failure_path(folder, '*').with_suffix('.txt')}, or run with --verbose.\n", highlight=False)


def _print_cause(console: Console, cause: Cause, number: int) -> None:
    """Print what is wrong, in how many scenarios, and what to do."""
    style = STYLES[Verdict.FAIL if cause.verdict is Verdict.PASS else cause.verdict]
    start = f"{number:>3}.  "
    kind = "" if cause.kind is Kind.BUG else f"{cause.kind.value}: "
    title = _broken(f"{start}{kind}{cause.title}", _width(console), len(start))
    console.print(Text(title, style=style), soft_wrap=True)
    for label, text in (("Seen in ", cause.extent), ("Do: ", cause.remedy)):
        if text:
            line = _broken(" " * len(start) + label + text, _width(console), len(start))
            console.print(Text(line, style="dim"), soft_wrap=True)


def print_evidence(console: Console, text: str) -> None:
    """Print the text of a failure; its lines are broken between words, below their beginning.

    A command stays one line, however long, and so does a place in a file: they are there to be copied.
    """
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip()) or _EVIDENCE_INDENT
        copied = line.lstrip().startswith(("Replay", 'File "'))
        console.print(Text(line if copied else _broken(line, _width(console), indent)), soft_wrap=True)


def _width(console: Console) -> int:
    return console.width if console.is_terminal else min(console.width, _WIDTH_OF_LOGS)


def _broken(line: str, width: int, indent: int) -> str:
    """Return `line` broken between words after `width` columns; what follows the first break is indented."""
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def _one_line(outcome: Outcome) -> str:
    result = outcome.failed_result
    return f"{result.verdict.value}  {outcome.id}: {shorten(outcome.why)}"


def print_totals(console: Console, report: Report, *, notes: bool = False) -> None:
    """Print the last lines of a run: counts, times and the answer; with `notes` what trainings have reached."""
    for outcome in report.scenarios if notes else ():
        for note in outcome.notes:
            console.print(Text(f"{outcome.id}: {note}"), soft_wrap=True)
    for world_size, ms in report.median_warm_scenario_ms.items():
        console.print(
            f"median warm scenario at world size {world_size}: {ms:.1f} ms, others beside it", highlight=False
        )
    totals = report.totals
    several = any(len(outcome.requirements) > 1 for outcome in report.scenarios)
    console.print(
        f"{counted(totals.scenarios, 'scenario')} in {report.duration_s:.1f} s, evidence for"
        f" {counted(totals.requirements, 'requirement')}{' (one scenario may serve several)' * several}",
        highlight=False,
    )
    console.print(f"{report.short_name}: {report.counts}", highlight=False)
    if report.native_verdicts:
        console.print(f"torch's DDP: {counts_text(report.native_verdicts)}", highlight=False)
    _print_unsupported(console, report)
    again = [one for each in report.scenarios for one in each.subject.findings if one.summary.startswith(TRIED_AGAIN)]
    if again:
        said = f"{counted(len(again), 'scenario')} had to be {shorten(again[0].summary)}."
        console.print(Text(_broken(said, _width(console), 0)), soft_wrap=True)
    for outcome in report.contaminated:
        console.print(Text(f"{outcome.id}: {outcome.subject.findings[0].summary}", style="bold red"), soft_wrap=True)
    if not report.is_complete:
        console.print(
            f"Incomplete: {report.num_not_run} of {counted(totals.selected, 'scenario')} did not run.",
            style="bold yellow",
            highlight=False,
        )
    elif report.is_green and report.num_excused:
        console.print("Nothing failed that was not expected to.", style="bold green")
    elif report.is_green:
        console.print(f"{report.short_name} {kept(report)}.", style="bold green", highlight=False)
    elif not report.failures and report.contaminated:
        console.print("Verdicts depend on what ran before.", style="bold red")
    elif not report.failures:
        console.print(_nothing_passed(report), style="bold red", highlight=False)
    else:
        console.print(f"{_failed(report)}. {report.short_name} {kept(report)}.", style="bold red", highlight=False)


def _failed(report: Report) -> str:
    """Return e.g. `2 scenarios failed, 1 scenario passed that was known to fail`."""
    passed = report.num_unexpected_passes
    failed = len(report.failures) - passed
    known = f"{counted(passed, 'scenario')} passed that {'was' if passed == 1 else 'were'} known to fail"
    return ", ".join([f"{counted(failed, 'scenario')} failed"] * bool(failed) + [known] * bool(passed))


def _print_unsupported(console: Console, report: Report) -> None:
    """Print why scenarios were UNSUPPORTED, a line for each reason, and what to do where something is undeclared."""
    reasons = reasons_unsupported(report.scenarios)
    if not reasons:
        return
    console.print("UNSUPPORTED, and so not judged:", highlight=False)
    for reason, count in reasons[:_NUM_REASONS]:
        console.print(Text(_broken(f"{count:>6}  {shorten(reason)}", _width(console), 8)), soft_wrap=True)
    if others := reasons[_NUM_REASONS:]:
        rest = counted(len(others), "other reason")
        console.print(f"{sum(count for _, count in others):>6}  for {rest}; the page has them", highlight=False)
    if any(" declares no " in reason for reason, _ in reasons):
        advice = "To have it judged where it exists, declare it: `capabilities` of the Subject or of the Backend."
        console.print(advice, highlight=False)


def _nothing_passed(report: Report) -> str:
    """Return why a run without any failure shows nothing all the same, and what to do."""
    said = "Nothing passed, so this run shows nothing"
    if excused := report.num_excused:
        them = "what failed was known to fail" if excused > 1 else "the one that failed was known to"
        return f"{said}: {them}. Select more scenarios, or leave out --baseline and --expectations to see why it fails."
    return f"{said}. Select scenarios that need no more than what is declared."
