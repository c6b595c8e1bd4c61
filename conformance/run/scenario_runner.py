"""Runs one scenario on the subject and on torch's own DDP, and has both judged."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from conformance.backends.backend import CAPABILITIES, Backend
from conformance.checkers.checker import harness_error
from conformance.models.catalogue import get_fixture
from conformance.observation import KEPT_ONCE, Facts, Observation
from conformance.own_mistake import present
from conformance.programs.registry import Program, get_program
from conformance.run.interpreter import check_interpreter
from conformance.run.judge import authority_of, judge
from conformance.run.known_failures import Excuses
from conformance.run.outcome import NATIVE, Note, Outcome
from conformance.run.patience import hangs_after, hurried
from conformance.run.shortage import denials, shortage_since
from conformance.scenario import DTYPES, Scenario
from conformance.subjects.subject import CAPABILITIES as OF_SUBJECTS
from conformance.subjects.subject import KNOWN, NO_DDP, Subject, capabilities_of
from conformance.truth.expected import Satisfies
from conformance.verdict import Finding, RankFate, ScenarioResult, Verdict

#: So many of a rank's last collectives go into the report of a scenario that did not pass: enough for a timeline.
NUM_KEPT_COLLECTIVES = 40

#: So many characters of what a rank wrote stay of a failure that fresh ranks do not show.
_MOST_SAID = 3000

#: These say that a rank kept something that it had not before.
_OF_TRACES = ("leaves_no_trace", "leaves_no_process")

#: What a scenario needs of a backend that names one of these in its arguments.
_DECLARED = frozenset(DTYPES) & CAPABILITIES


class Ranks(Protocol):
    """What runs a scenario on ranks: a `Controller`, or a stand-in in tests."""

    def start(
        self, scenario: Scenario, subject: Subject, *, fresh: bool = False
    ) -> Callable[[float], dict[int, Observation] | None]:
        """Start to run the scenario; with `fresh` on ranks that have run nothing yet.

        Returns a function that waits for what every rank observed; None if no rank has made progress for so many
        seconds before. Other ranks may run other scenarios meanwhile. With `fresh` none of the ranks that have run the
        subject at this world size runs another scenario.
        """

    def expect(self, scenario: Scenario) -> Callable[[], Mapping[int, Facts]]:
        """Start to compute the facts that every rank must show; returns a function that waits for them, or raises."""


@dataclass(frozen=True)
class Attempt:
    """One subject's try at one scenario: what the ranks observed, or why there is nothing to observe.

    `shortage` says what the machine denied the ranks meanwhile.
    """

    scenario: Scenario
    subject: Subject
    observations: Mapping[int, Observation] = field(default_factory=dict)
    duration_ms: float = 0.0
    unsupported: str = ""
    error: str = ""
    shortage: str = ""

    @property
    def after(self) -> tuple[str, ...]:
        """The scenarios that the same ranks ran before, the latest last; empty if they were fresh."""
        return next((observation.after for observation in self.observations.values() if observation.after), ())

    def notes(self, truth: Truth) -> tuple[Note, ...]:
        """Return rank 0's numbers about the whole run for which the truth demands a property and no exact value."""
        if truth.facts is None or 0 not in truth.facts or 0 not in self.observations:
            return ()
        observed = self.observations[0].facts
        return tuple(
            Note(name, observed[name], demand.name)
            for name, demand in truth.facts[0].items()
            if isinstance(demand, Satisfies) and "/" not in name and type(observed.get(name)) in (int, float)
        )

    def result(self, verdict: Verdict, findings: tuple[Finding, ...]) -> ScenarioResult:
        """Return the report's value; the ranks' ends are kept unless the verdict is PASS."""
        fates = () if verdict is Verdict.PASS else tuple(map(_rank_fate, self.observations.values()))
        return ScenarioResult(
            subject=self.subject.name,
            verdict=verdict,
            duration_ms=self.duration_ms,
            num_collectives=max((len(observation.history) for observation in self.observations.values()), default=0),
            findings=findings,
            ranks=fates,
        )


@dataclass(frozen=True)
class Truth:
    """The facts that every rank must show, or why they could not be computed."""

    facts: Mapping[int, Facts] | None = None
    error: str = ""

    @staticmethod
    def begin(program: Program, scenario: Scenario, ranks: Ranks) -> Callable[[], Truth]:
        """Have `ranks` start to compute the program's expectation; returns a function that waits for the truth.

        An error in the expectation is the harness's failure, kept as text.
        """
        if program.expectation is None:
            return Truth
        try:
            facts = ranks.expect(scenario)
        except Exception:
            error = traceback.format_exc()
            return lambda: Truth(error=error)

        def wait() -> Truth:
            try:
                return Truth(facts())
            except Exception:
                return Truth(error=traceback.format_exc())

        return wait


def judged(
    attempt: Attempt, program: Program, truth: Truth, authority: Mapping[int, Facts] | None = None
) -> ScenarioResult:
    """Return the verdict on `attempt`; `authority` are the facts in which torch's own DDP is to be followed."""
    if attempt.unsupported:
        return attempt.result(Verdict.UNSUPPORTED, (Finding("runner", Verdict.UNSUPPORTED, attempt.unsupported),))
    # Where ranks did not even return, how they ended is the verdict, also on a backend that gives no rank a group.
    returned = all(one.fate.kind == "returned" for one in attempt.observations.values())
    error = attempt.error or (truth.error if returned else "")
    if not error:
        try:
            verdict, findings = judge(attempt.scenario, program, attempt.observations, truth.facts, authority)
        except Exception:
            error = traceback.format_exc()
        else:
            if not (verdict.is_failure and attempt.shortage):
                return attempt.result(verdict, findings)
            summary = f"the verdict would be {verdict.value}, but {attempt.shortage}"
            return attempt.result(Verdict.HARNESS_ERROR, (harness_error("runner", summary), *findings))
    summary = f"the harness itself failed: {error.strip().splitlines()[-1]}"
    return attempt.result(Verdict.HARNESS_ERROR, (Finding("runner", Verdict.HARNESS_ERROR, summary, error.strip()),))


class ScenarioRunner:
    """Runs scenarios on warm ranks, several at a time if asked to, and a failure once more on fresh ones.

    Whoever trains wraps a model once in a process, so that a DDP whose first wrapper is wrong is wrong for everybody:
    the first scenario of each requirement has fresh ranks. So has the next one after a failure of the subject, which
    may have left what ranks cannot notice.
    """

    def __init__(
        self,
        subject: Subject,
        backend: Backend,
        ranks: Ranks,
        *,
        native: bool = True,
        excuses: Excuses = lambda scenario, verdict: None,
    ) -> None:
        """Bind the subject to `ranks`; with `native`, torch's own DDP runs every scenario too.

        Raises `InterpreterError` where this Python skips the assertions that verdicts rest on.
        """
        check_interpreter()
        torch_ddp = KNOWN[NATIVE]
        self.subject = subject
        self.backend = backend
        self._ranks = ranks
        self._excuses = excuses
        self._num_hangs = 0  # of the subject, in a row
        self._started: dict[str, Scenario] = {}
        self._exercised: set[str] = set()  # what fresh ranks of the subject have exercised
        self._doubted: set[tuple[int, bool, bool]] = set()  # the kinds of ranks to be replaced
        self._native = torch_ddp if native and torch_ddp.target != subject.target else None

    def run(self, scenario: Scenario) -> Outcome:
        """Run `scenario` in both columns. Only Ctrl-C escapes; whatever else happens is a verdict."""
        return present(self.start(scenario)(math.inf))

    def start(self, scenario: Scenario) -> Callable[[float], Outcome | None]:
        """Start to run `scenario` in both columns; returns a function that waits for them and judges.

        That one returns the outcome; None while ranks have not ended that have made no progress for so many seconds,
        0 for whether they have ended now. It waits for the truth in any case. Other scenarios may be started meanwhile.
        On a device everything has ended when this returns: its memory may not hold two DDPs, and one that hangs may
        keep it busy.
        """
        self._started[scenario.id] = scenario
        program = get_program(scenario.program)
        subjects = [self.subject]
        if self._native is not None and not program.without_ddp:
            subjects.append(self._native)
        runs = not all(self._why_unsupported(scenario, subject) for subject in subjects)
        wait_for_truth = Truth.begin(program, scenario, self._ranks) if runs else Truth
        waits: list[Callable[[float], Attempt | None]] = []
        attempts: dict[int, Attempt] = {}  # by the column
        for column, subject in enumerate(subjects):
            if column == 0:
                fresh = not self._why_unsupported(scenario, subject) and self._wants_fresh(scenario, program)
                waits.append(self._start(hurried(scenario, self._num_hangs), subject, fresh=fresh))
            else:
                waits.append(self._start(scenario, subject))
            if self.backend.device_type != "cpu":
                attempts[column] = present(waits[column](math.inf))
        truths = [wait_for_truth()] if attempts else []

        def wait(silence_s: float) -> Outcome | None:
            if not truths:
                truths.append(wait_for_truth())
            for column, wait_for_column in enumerate(waits):
                attempt = None if column in attempts else wait_for_column(silence_s)
                if attempt is not None:
                    attempts[column] = attempt
            if len(attempts) < len(waits):
                return None
            return self._judged(scenario, program, truths[0], attempts[0], attempts.get(1))

        return wait

    def _judged(
        self, scenario: Scenario, program: Program, truth: Truth, attempt: Attempt, native: Attempt | None
    ) -> Outcome:
        """Return the outcome of both columns' attempts, after another attempt of a subject that failed when warm."""
        beside, authority = None, None
        if native is not None:
            beside = judged(native, program, truth)
            authority = authority_of(program, beside.verdict, native.observations)

        def judge(one: Attempt) -> ScenarioResult:
            return judged(one, program, truth, authority)

        attempt, result = self._settled(attempt, judge)
        contaminated_by = ""
        if result.verdict.is_failure and attempt.after and not self._is_known(scenario, result.verdict):
            again, alone = self._settled(self._attempt(attempt.scenario, fresh=True), judge)
            if alone.verdict is not result.verdict:
                if spoiler := self._spoiler(attempt, result.verdict, judge):
                    contaminated_by, is_certain = spoiler
                    attempt, result = again, _contaminated(alone, result, contaminated_by, is_certain=is_certain)
                else:
                    result = _unstable(result, alone.verdict, attempt.after[-1])
        if result.verdict.is_failure or contaminated_by:
            self._doubted.add(scenario.kind_of_ranks)
        outcome = Outcome.of(
            scenario,
            result,
            beside,
            notes=attempt.notes(truth),
            warm=bool(attempt.after),
            excuse=self._excuses(scenario, result.verdict),
            contaminated_by=contaminated_by,
        )
        self._num_hangs = hangs_after(outcome, self._num_hangs)
        return outcome

    def _settled(self, attempt: Attempt, judge: Callable[[Attempt], ScenarioResult]) -> tuple[Attempt, ScenarioResult]:
        """Return the attempt and its result; where ranks only kept what a process may keep once, those of a second one.

        Ranks that have run the scenario before keep nothing more of that kind. If such ranks cannot be had, the first
        attempt stands.
        """
        result = judge(attempt)
        if not _kept_at_most_once(attempt, result):
            return attempt, result
        again = self._attempt(attempt.scenario)
        own = attempt.scenario.id
        if again.after[-1:] != (own,):  # the same ranks run another scenario meanwhile
            self._attempt(attempt.scenario, fresh=True)
            again = self._attempt(attempt.scenario)
        return (again, judge(again)) if again.after[-1:] == (own,) else (attempt, result)

    def _spoiler(
        self, attempt: Attempt, verdict: Verdict, judge: Callable[[Attempt], ScenarioResult]
    ) -> tuple[str, bool] | None:
        """Return the scenario that spoils `attempt`, and whether that is certain; None if none does.

        It is certain if other ranks that run it and what followed come to `verdict` as well; what several left
        together is charged to the first of them. Where ranks cannot run the same again, it is a guess.
        """

        def comes_after(number: int) -> bool | None:
            """Whether it comes to that verdict after the latest `number` scenarios; None if ranks cannot run them."""
            earlier = attempt.after[-number:]
            if not all(name in self._started for name in earlier):
                return None
            for place, name in enumerate(earlier):
                self._attempt(self._started[name], fresh=place == 0)
            again = self._attempt(attempt.scenario)
            return judge(again).verdict is verdict if again.after == earlier else None

        too_few, enough = 0, 1
        found = comes_after(enough)
        if found is False and len(attempt.after) > enough:
            too_few, enough = enough, len(attempt.after)
            found = comes_after(enough)
        if found is None:
            return attempt.after[-1], False
        while found and enough - too_few > 1:
            middle = (too_few + enough) // 2
            if comes_after(middle):
                enough = middle
            else:
                too_few = middle
        return (attempt.after[-enough], True) if found else None

    def _attempt(self, scenario: Scenario, *, fresh: bool = False) -> Attempt:
        return present(self._start(scenario, self.subject, fresh=fresh)(math.inf))

    def _wants_fresh(self, scenario: Scenario, program: Program) -> bool:
        """Whether the subject's ranks must be fresh this time, which counts as having had them.

        Where ranks compile, warming up takes longer than the scenario: there it is the first of each program.
        """
        # Without a DDP nothing is constructed in a process that could be wrong the first time.
        new = set() if program.without_ddp else {program.name} if program.preload else set(scenario.requirements)
        wants = scenario.kind_of_ranks in self._doubted or not new <= self._exercised
        self._exercised |= new
        self._doubted.discard(scenario.kind_of_ranks)
        return wants

    def _is_known(self, scenario: Scenario, verdict: Verdict) -> bool:
        """Whether a failure is excused: whether it also comes on fresh ranks says nothing that anybody asks for."""
        excuse = self._excuses(scenario, verdict)
        return excuse is not None and excuse.holds

    def _start(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> Callable[[float], Attempt | None]:
        """Start an attempt; returns a function that waits for its end, as that of `Ranks.start`."""
        if reason := self._why_unsupported(scenario, subject):
            return lambda silence_s: Attempt(scenario, subject, unsupported=reason)
        before, started = denials(), time.perf_counter()
        try:
            wraps = not get_program(scenario.program).without_ddp
            wait = self._ranks.start(scenario, subject if wraps else NO_DDP, fresh=fresh)
        except Exception:
            error = traceback.format_exc()
            return lambda silence_s: Attempt(scenario, subject, error=error)

        def ended(silence_s: float) -> Attempt | None:
            try:
                observations = wait(silence_s)
                if observations is None:
                    return None
                attempt = Attempt(scenario, subject, observations)
            except Exception:
                attempt = Attempt(scenario, subject, error=traceback.format_exc())
            # As the ranks say: nobody need have listened when they ended.
            duration_ns = max((seen.duration_ns for seen in attempt.observations.values()), default=0)
            duration_ms = round((duration_ns / 1e9 or time.perf_counter() - started) * 1000, 3)
            return replace(attempt, duration_ms=duration_ms, shortage=shortage_since(before))

        return ended

    def _why_unsupported(self, scenario: Scenario, subject: Subject) -> str:
        limit = self.backend.max_world_size()
        if limit is not None and scenario.world_size > limit:
            return f"backend {self.backend.name} serves at most {limit} rank(s) here"
        if missing := sorted(needs_of(scenario) - self.backend.capabilities - subject.capabilities):
            theirs = [name for name in missing if name in OF_SUBJECTS]
            others = [name for name in missing if name not in OF_SUBJECTS]
            lacks = ((subject.name, theirs), (self.backend.name, others))
            return " and ".join(f"{who} declares no {', '.join(names)}" for who, names in lacks if names)
        return ""


def needs_of(scenario: Scenario) -> frozenset[str]:
    """Return what a scenario needs: what it lists, and what follows from its options, its model and its dtypes.

    Subjects declare options, backends dtypes, and both sparse gradients, so that no chapter must think of them.
    """
    named = {scenario.dtype, *_texts(scenario.arguments)}
    has_sparse = get_fixture(scenario.model).sparse or "sparse" in {*named, *scenario.needs}
    sparse = {"sparse", "sparse_gradients"} if has_sparse else set()
    return frozenset({*scenario.needs, *capabilities_of(scenario.options), *named & _DECLARED, *sparse})


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in `value`, JSON data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for one in value.values() for text in _texts(one))
    elif isinstance(value, (list, tuple)):
        yield from (text for one in value for text in _texts(one))


def _kept_at_most_once(attempt: Attempt, result: ScenarioResult) -> bool:
    """Whether the attempt failed for nothing but what ranks kept, and a process may keep all of that once."""
    kept = [phrase for observation in attempt.observations.values() for phrase in observation.hygiene]
    failed = [finding for finding in result.findings if finding.verdict.is_failure]
    only_kept = all(finding.checker in _OF_TRACES for finding in failed)
    return bool(failed) and only_kept and all(phrase.startswith(KEPT_ONCE) for phrase in kept)


def _contaminated(alone: ScenarioResult, after: ScenarioResult, by: str, *, is_certain: bool) -> ScenarioResult:
    """Return the verdict of fresh ranks with what it was `after` the same ranks had run the scenario `by`."""
    summary = (
        f"contaminated by {by}: {after.verdict.value} on ranks that had run it{', twice' * is_certain},"
        f" {alone.verdict.value} on fresh ones; it left something behind that ranks could not notice"
        f"{', or the verdict is not stable' * (not is_certain)}"
    )
    told = [one.summary for one in after.findings_that_tell]
    told += [f"rank {one.rank} said:\n{one.stderr[-_MOST_SAID:]}" for one in after.ranks if one.stderr]
    finding = Finding("runner", alone.verdict, summary, "\n".join(told))
    return replace(alone, findings=(finding, *alone.findings))


def _unstable(result: ScenarioResult, alone: Verdict, before: str) -> ScenarioResult:
    """Return the failure `result` with what came when it was tried again: what fails at times, fails."""
    summary = (
        f"the verdict is not stable: {result.verdict.value}, then {alone.value} on fresh ranks, and again no"
        f" {result.verdict.value} on others that had first run what those that failed had, {before} last; replay it"
        " with --times 100"
    )
    return replace(result, findings=(*result.findings, Finding("runner", result.verdict, summary)))


def _rank_fate(observation: Observation) -> RankFate:
    history, raised = observation.history, observation.raised
    return RankFate(
        rank=observation.rank,
        fate=str(raised or observation.fate) + (f", on {observation.host}" if observation.host else ""),
        phase=observation.phase,
        last_collective=history[-1].describe() if history else "",
        stack=observation.stack or (raised.traceback if raised else ""),
        stderr=observation.stderr,
        collectives=history[-NUM_KEPT_COLLECTIVES:],
    )
