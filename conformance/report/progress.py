"""What a person sees of a run while it lasts: a bar, and a line for each cause of failures."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from types import TracebackType

from rich import progress as bar
from rich.console import Console
from rich.text import Text

from conformance.checkers.explanation import counted, shorten
from conformance.report.causes import cause_of
from conformance.report.console import make_console
from conformance.report.lines import print_evidence
from conformance.run.outcome import Outcome, Progress
from conformance.run.patience import HANGS_IN_A_ROW, HURRIES, hangs_after
from conformance.scenario import Scenario
from conformance.spec.cheapest import work

#: Off a terminal, at least so much time passes between two lines about the progress of a run.
SECONDS_BETWEEN_LINES = 15.0
_WIDTH_OF_NAME = 40  # of the scenario that runs, beside the bar
#: A narrower terminal gets no bar and a shorter name, so that the line stays one.
_WIDTH_WITH_BAR = 110
_WIDTH_OF_NAME_ALONE = 24


class ProgressBar:
    """A bar over the scenarios of a run, to be passed to the runner as `on_event`.

    Off a terminal, in a CI log say, there is a line now and then instead, on standard error. The first failure of each
    cause gets a line at once.
    """

    def __init__(
        self,
        console: Console,
        scenarios: tuple[Scenario, ...],
        statements: Mapping[str, str],
        *,
        quiet: bool = False,
    ) -> None:
        """Prepare a bar; nothing is drawn before the first event, and nothing at all if `quiet`.

        `statements` are the sentences of requirements by their ids.
        """
        self._quiet = quiet
        self._statements = statements
        self._width_of_name = _WIDTH_OF_NAME if console.width >= _WIDTH_WITH_BAR else _WIDTH_OF_NAME_ALONE
        self._current_id = ""  # the scenario that began last
        self._log = None if console.is_terminal else make_console(stderr=True)  # a log gets lines, no bar
        self._last_line_at = 0.0
        self._total = len(scenarios)
        self._forecast = _Forecast(scenarios)
        self._started = 0.0
        self._hangs = 0  # in a row
        self._num_failed = self._num_contaminated = 0
        self._causes: set[str] = set()
        self._progress = bar.Progress(
            bar.TextColumn("{task.description}"),
            *[bar.BarColumn()] * (console.width >= _WIDTH_WITH_BAR),
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
            self._current_id = event.scenario.id
        self._started = self._started or time.monotonic()  # not before: starting the ranks says nothing of the rest
        if event.outcome is not None:
            self._note_failure(event.outcome)
            self._forecast.note(event.scenario, event.outcome)
            self._progress.update(self._task, left=self._forecast.left_s(time.monotonic() - self._started))
        self._progress.update(
            self._task,
            completed=event.done,
            description=shorten(self._current_id, self._width_of_name),
            verdicts=f"[red]{self._failures()}[/]" if self._num_failed or self._num_contaminated else "",
        )
        self._last_line_at = self._last_line_at or self._started
        if self._log is not None and time.monotonic() - self._last_line_at >= SECONDS_BETWEEN_LINES:
            self._last_line_at = time.monotonic()
            self._log.print(self._line(event.done), soft_wrap=True)

    def _note_failure(self, outcome: Outcome) -> None:
        self._hangs, before = hangs_after(outcome, self._hangs), self._hangs
        if self._hangs == HANGS_IN_A_ROW != before:
            print_evidence(self._log or self._progress.console, HURRIES)
        self._num_contaminated += bool(outcome.contaminated_by)
        if not outcome.is_failure:
            return
        self._num_failed += 1
        said = cause_of(outcome, self._statements).sentence
        if said in self._causes:
            return
        self._causes.add(said)
        line = Text(f"{outcome.failed_result.verdict.value}  {outcome.id}: {said}")
        if self._log is not None:
            self._log.print(line, soft_wrap=True)
        else:
            self._progress.console.print(line, no_wrap=True, overflow="ellipsis")

    def _failures(self) -> str:
        """Return e.g. `3 failed, 1 cause, 1 contaminated`."""
        causes = f", {counted(len(self._causes), 'cause')}" if self._num_failed else ""
        contaminated = f", {self._num_contaminated} contaminated" if self._num_contaminated else ""
        return f"{self._num_failed} failed{causes}{contaminated}"

    def _line(self, done: int) -> str:
        elapsed = time.monotonic() - self._started
        left = self._forecast.left_s(elapsed)
        remaining = f", about {_clock(left)} left" if left else ""
        so_far = f"{done} of {counted(self._total, 'scenario')}"
        now = f"; now {self._current_id}" if self._current_id else ""
        return f"{so_far}, {self._failures()}, {_clock(elapsed)} elapsed{remaining}{now}"


class _Forecast:
    """How long the rest of a run takes: what each requirement's scenarios so far took, times those that are left.

    Scenarios of one requirement cost alike, for their work; those of two may differ a hundredfold, and a run begins
    with one of each. Work is counted in forward passes over all ranks.
    """

    def __init__(self, scenarios: Iterable[Scenario]) -> None:
        self._left: Counter[str] = Counter()
        self._work: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        for scenario in scenarios:
            self._left[scenario.leading_requirement] += work(scenario)

    def note(self, scenario: Scenario, outcome: Outcome) -> None:
        """Learn from a scenario that has run."""
        requirement, done = scenario.leading_requirement, work(scenario)
        took_ms = sum(result.duration_ms for result in (outcome.subject, outcome.native) if result is not None)
        self._left[requirement] -= done
        self._work[requirement] += done
        self._seconds[requirement] += took_ms / 1000

    def left_s(self, elapsed_s: float) -> float:
        """Return the seconds left after `elapsed_s`, in which lanes may have worked side by side; at first 0."""
        work_done, took_s = self._work.total(), sum(self._seconds.values())
        if not took_s:
            return 0.0
        average = took_s / work_done
        rates = {name: self._seconds[name] / done for name, done in self._work.items()}
        return elapsed_s / took_s * sum(left * rates.get(name, average) for name, left in self._left.items())


class _Remaining(bar.ProgressColumn):
    def render(self, task: bar.Task) -> Text:
        left = task.fields["left"]
        if left is None or task.completed < 5:  # too little to extrapolate from
            return Text("")
        return Text(f"about {_clock(left)} left", style="cyan")


def _clock(seconds: float) -> str:
    return "{}:{:02d}".format(*divmod(round(seconds), 60))
