"""What a person sees of a run: a bar while it lasts, then the table, the failures and the totals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from rich import progress as bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.bench.ratio import Ratio
from conformance.report.failure import failure_text, replay_command
from conformance.run.outcome import Progress, RequirementSummary, RunReport, combine
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue
from conformance.suite import work
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

#: Off a terminal, at least so much time passes between two lines about the progress of a run.
SECONDS_BETWEEN_LINES = 15.0


class ProgressBar:
    """A bar over the scenarios of a run, to be passed to the runner as `on_event`.

    The remaining time is what the scenarios so far took per unit of work, times the work left. Work is counted in
    forward passes over all ranks, because four ranks training for fifty steps are not one rank taking one. Off a
    terminal, in a CI log say, there is a line now and then instead, on standard error.
    """

    def __init__(self, console: Console, scenarios: tuple[Scenario, ...]) -> None:
        """Prepare a bar; nothing is drawn before the first event."""
        self._lines = None if console.is_terminal else Console(stderr=True, highlight=False, soft_wrap=True)
        self._said = 0.0
        self._total = len(scenarios)
        self._work_left = sum(map(work, scenarios))
        self._work_done = 0
        self._started = 0.0
        self._verdicts: Counter[Verdict] = Counter()
        self._progress = bar.Progress(
            bar.TextColumn("{task.description}"),
            bar.BarColumn(),
            bar.MofNCompleteColumn(),
            bar.TextColumn("{task.fields[verdicts]}"),
            bar.TimeElapsedColumn(),
            _Remaining(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
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
        self._started = self._started or time.monotonic()  # not before: starting the ranks says nothing of the rest
        if event.outcome is not None:
            self._verdicts[event.outcome.result.verdict] += 1
            self._work_done += work(event.scenario)
            self._work_left -= work(event.scenario)
            left = (time.monotonic() - self._started) / self._work_done * self._work_left
            self._progress.update(self._task, left=left)
        failures = sum(count for verdict, count in self._verdicts.items() if verdict.is_failure)
        self._progress.update(
            self._task,
            completed=event.done,
            description=f"world size {event.scenario.world_size}",
            verdicts=f"[red]{failures} failed[/]" if failures else "",
        )
        self._said = self._said or self._started
        if self._lines is not None and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self._lines.print(self._line(event.done, failures))

    def _line(self, done: int, failures: int) -> str:
        elapsed = time.monotonic() - self._started
        left = elapsed / max(self._work_done, 1) * self._work_left
        remaining = f", about {_clock(left)} left" if self._work_left else ""
        return f"{done} of {self._total} scenarios, {failures} failed, {_clock(elapsed)} elapsed{remaining}"


class _Remaining(bar.ProgressColumn):
    def render(self, task: bar.Task) -> Text:
        left = task.fields["left"]
        if left is None or task.completed < 5:  # too little to extrapolate from
            return Text("")
        return Text(f"about {_clock(left)} left", style="cyan")


def _clock(seconds: float) -> str:
    return "{}:{:02d}".format(*divmod(round(seconds), 60))


def print_report(
    console: Console, report: RunReport, catalogue: Catalogue, folder: Path, *, with_table: bool = True
) -> None:
    """Print table, failures and totals; `folder` is where the report's files are."""
    summaries = report.summaries(catalogue)
    if with_table:
        console.print(requirements_table(report, catalogue, summaries))
    print_failures(console, report, catalogue, folder)
    if report.performance:
        console.print("\nStep time, as a ratio:")
        console.print(ratios_table(report.performance))
    print_totals(console, report, summaries)


def requirements_table(report: RunReport, catalogue: Catalogue, summaries: tuple[RequirementSummary, ...]) -> Table:
    """Return the table of verdicts: one row per chapter, and below it one per requirement."""
    with_native = bool(report.native_totals)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("requirement", ratio=1)
    table.add_column("scenarios", justify="right")
    table.add_column(_short(report.subject), no_wrap=True)
    if with_native:
        table.add_column("torch's DDP", no_wrap=True)
    for chapter in catalogue.chapters:
        rows = [summary for summary in summaries if summary.requirement.chapter == chapter.name]
        if not rows:
            continue
        if table.row_count:
            table.add_row()
        of_chapter = [outcome for outcome in report.outcomes if outcome.scenario.chapter == chapter.name]
        cells = [verdict_cell(Counter(outcome.result.verdict for outcome in of_chapter))]
        if with_native:
            cells.append(verdict_cell(Counter(o.native.verdict for o in of_chapter if o.native is not None)))
        table.add_row(chapter.prefix, Text(chapter.title), str(len(of_chapter)), *cells, style="bold")
        for row in rows:
            cells = [verdict_cell(row.verdicts)]
            if with_native:
                cells.append(verdict_cell(row.native_verdicts))
            table.add_row(row.requirement.id, Text(row.requirement.statement), str(row.num_scenarios), *cells)
    return table


def verdict_cell(verdicts: Mapping[Verdict, int]) -> Text:
    """Return the combined verdict, with a count when not all scenarios agree."""
    if not verdicts:
        return Text("-", style="dim")
    verdict = combine(verdicts)
    total = sum(verdicts.values())
    count = f" {verdicts[verdict]}/{total}" if verdicts[verdict] != total else ""
    return Text(verdict.value + count, style=STYLES[verdict])


def ratios_table(ratios: Iterable[Ratio]) -> Table:
    """Return the table of step times beside torch's DDP: below 1 the contestant is faster than the reference."""
    table = Table("workload", "options", "compared with", "ranks", "median ratio", "quartiles", "rounds")
    for one in ratios:
        quartiles = f"{one.lower:.3f} - {one.upper:.3f}"
        table.add_row(
            one.workload, one.variant, one.reference, str(one.world_size), f"{one.median:.3f}", quartiles,
            str(one.rounds),
        )  # fmt: skip
    return table


def print_failures(console: Console, report: RunReport, catalogue: Catalogue, folder: Path) -> None:
    """Print why it failed: one explanation per requirement, and how many more there are of its kind."""
    by_requirement: dict[str, int] = Counter(outcome.scenario.leading_requirement for outcome in report.failures)
    explained: set[str] = set()
    for outcome in report.failures:
        requirement_id = outcome.scenario.leading_requirement
        if requirement_id in explained:
            continue
        explained.add(requirement_id)
        console.print()
        replay = replay_command(outcome.scenario, report.subject, report.backend, folder)
        console.print(Text(failure_text(outcome, report.backend, catalogue, replay)), soft_wrap=True)
        if more := by_requirement[requirement_id] - 1:
            where = folder / "failures"
            console.print(f"      and {more} more of {requirement_id} in {where}", style="dim", highlight=False)


def print_totals(console: Console, report: RunReport, summaries: tuple[RequirementSummary, ...]) -> None:
    """Print the last lines of a run: counts, notes, times, and the answer."""
    console.print()
    for outcome in report.outcomes:
        for note in outcome.notes:
            text = f"{outcome.scenario.id}: {note.name} {note.value:.4g} ({note.demand})"
            console.print(Text(text), soft_wrap=True)
    for world_size, ms in report.median_warm_ms().items():
        console.print(f"median warm scenario at world size {world_size}: {ms:.1f} ms", highlight=False)
    console.print(
        f"{counted(len(report.outcomes), 'scenario')} for {counted(len(summaries), 'requirement')}"
        f" in {report.duration_s:.1f} s",
        highlight=False,
    )
    console.print(f"{_short(report.subject)}: {_count_text(report.totals)}", highlight=False)
    if report.native_totals:
        console.print(f"torch's DDP: {_count_text(report.native_totals)}", highlight=False)
    expected = sum(outcome.expected is not None and not outcome.expected.is_failure for outcome in report.outcomes)
    if expected:
        console.print(f"{counted(expected, 'failure')} of these expected.", highlight=False)
    if not report.complete:
        console.print(
            f"Incomplete: {report.num_selected - len(report.outcomes)} of {report.num_selected} scenarios did not run.",
            style="bold yellow",
            highlight=False,
        )
    elif report.is_green and expected:
        console.print("Nothing failed that was not expected to.", style="bold green")
    elif report.is_green:
        console.print(f"{_short(report.subject)} keeps every requirement that was exercised.", style="bold green")
    elif not report.failures:
        console.print("Nothing passed, so this run shows nothing.", style="bold red")
    else:
        console.print(f"{counted(len(report.failures), 'scenario')} failed.", style="bold red", highlight=False)


def counted(number: int, noun: str) -> str:
    """Return e.g. `1 scenario` or `3 scenarios`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _count_text(totals: Mapping[Verdict, int]) -> str:
    return ", ".join(f"{totals[verdict]} {verdict.value}" for verdict in Verdict if totals.get(verdict))


def _short(subject: str) -> str:
    return subject.rpartition(":")[2]
