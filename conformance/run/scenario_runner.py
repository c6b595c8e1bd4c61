"""Runs one scenario on the subject and on torch's own DDP, and has both judged."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping

from conformance.backends.backend import Backend
from conformance.checkers.unconnected import TRIED_AGAIN, unconnected
from conformance.observation import Observation
from conformance.programs.registry import Program, get_program
from conformance.run.attempt import Attempt, Ranks, Truth, judged
from conformance.run.first_uses import FirstUses
from conformance.run.interpreter import check_interpreter
from conformance.run.judge import authority_of
from conformance.run.known_failures import Excuses
from conformance.run.needs import why_unsupported
from conformance.run.outcome import NATIVE, Outcome
from conformance.run.patience import hangs_after, hurried, shortened
from conformance.run.settlement import Settled, Settlement
from conformance.run.shortage import denials, shortage_since
from conformance.run.tried import tried_in
from conformance.scenario import Scenario
from conformance.subjects.subject import KNOWN, Subject, by_itself
from conformance.verdict import ScenarioResult, Verdict
from conformance.waiting.pending import Pending
from conformance.workers.hearing import LOST

#: Called with what the ranks of the subject observed.
OnObserved = Callable[[Scenario, Mapping[int, Observation]], None]


class ScenarioRunner:
    """Runs scenarios on warm ranks, several at a time if asked to, and a failure once more on fresh ones.

    The first scenario of each requirement has ranks that have run nothing yet (`first_uses`). So has the next one after
    a failure of the subject, which may have left what ranks cannot notice.
    """

    def __init__(
        self,
        subject: Subject,
        backend: Backend,
        ranks: Ranks,
        *,
        native: bool = True,
        excuses: Excuses = lambda scenario, verdict: None,
        first: frozenset[str] | None = None,
        on_observed: OnObserved = lambda scenario, observations: None,
    ) -> None:
        """Bind the subject to `ranks`; with `native`, torch's own DDP runs every scenario too.

        `first` are the ids of the first scenarios of requirements, where others run scenarios beside this one; without
        them, those that come here first. `on_observed` gets what ranks observed in the attempt that counts.

        Raises `InterpreterError` where this Python skips the assertions that verdicts rest on.
        """
        check_interpreter()
        torch_ddp = KNOWN[NATIVE]
        self.subject = subject
        self.backend = backend
        self._ranks = ranks
        self._excuses = excuses
        self._on_observed = on_observed
        self._num_hangs = 0  # of the subject, in a row
        self._started: dict[str, Scenario] = {}
        self._first, self._uses = first, FirstUses()
        self._native = torch_ddp if native and torch_ddp.target != subject.target else None

    def run(self, scenario: Scenario) -> Outcome:
        """Run `scenario` in both columns. Only Ctrl-C escapes; whatever else happens is a verdict."""
        return self.start(scenario).wait()

    def start(self, scenario: Scenario) -> Pending[Outcome]:
        """Start to run `scenario` in both columns; waiting for the outcome waits for the truth in any case.

        Other scenarios may be started meanwhile. On a device everything has ended when this returns: its memory may not
        hold two DDPs, and one that hangs may keep it busy.
        """
        self._started[scenario.id] = scenario
        program = get_program(scenario.program)
        subjects = [self.subject]
        if self._native is not None and not program.without_ddp:
            subjects.append(self._native)
        runs = not all(why_unsupported(scenario, subject, self.backend) for subject in subjects)
        pending_truth = Truth.begin(program, scenario, self._ranks) if runs else Pending.of(Truth())
        pending: list[Pending[Attempt]] = []
        attempts: dict[int, Attempt] = {}  # by the column
        settling: list[Pending[Outcome]] = []  # one, when both columns have ended
        for column, subject in enumerate(subjects):
            if column == 0:
                fresh = not why_unsupported(scenario, subject, self.backend) and self._is_first(scenario)
                known = program.without_ddp and self._is_known_to_hang(scenario)
                tried = shortened(scenario) if known else hurried(scenario, self._num_hangs)
                pending.append(self._start(tried, subject, fresh=fresh))
            else:
                pending.append(self._start(scenario, subject))
            if not self.backend.runs_side_by_side:
                attempts[column] = pending[column].wait()
        truths = [pending_truth.wait()] if attempts else []

        def outcome(seconds: float) -> Outcome | None:
            if settling:
                return settling[0].within(seconds)
            if not truths:
                truths.append(pending_truth.wait())
            for column, one in enumerate(pending):
                attempt = None if column in attempts else one.within(seconds)
                if attempt is not None:
                    attempts[column] = attempt
            if len(attempts) < len(pending):
                return None
            settling.append(self._outcome(scenario, program, truths[0], attempts[0], attempts.get(1)))
            return settling[0].within(seconds)

        return Pending(outcome)

    def _outcome(
        self, scenario: Scenario, program: Program, truth: Truth, attempt: Attempt, native: Attempt | None
    ) -> Pending[Outcome]:
        """Return the outcome of both columns' attempts, after another attempt of a subject that failed when warm.

        So has a column another attempt, on fresh ranks, whose ranks could not connect to each other.
        """
        attempt, tried_again = self._begun(attempt)
        if native is not None:
            native, _ = self._begun(native)
        beside = authority = None
        if native is not None:
            beside = judged(native, program, truth)
            authority = authority_of(program, beside.verdict, native.observations)
        settlement = Settlement(
            lambda one: judged(one, program, truth, authority), self._try_again, self._started, program.without_ddp
        )

        def told(settled: Settled) -> Outcome:
            self._on_observed(scenario, settled.attempt.observations)
            # A backend that is known to fail there leaves no DDP behind.
            excuse = self._excuses(scenario, settled.result)
            is_known = program.without_ddp and excuse is not None and excuse.holds
            if (settled.result.verdict.is_failure and not is_known) or settled.contaminated_by:
                self._doubt(scenario)
            result = excuse.told(settled.result) if excuse is not None else settled.result
            if tried_again:
                result = result.with_note(tried_again)
            outcome = Outcome.of(
                scenario,
                result,
                beside,
                notes=settled.attempt.notes(truth),
                native_notes=native.notes(truth) if native is not None else (),
                warm=bool(settled.attempt.after),
                excuse=excuse,
                contaminated_by=settled.contaminated_by,
                tried=tried_in(scenario, settled.attempt.observations, settled.result.verdict),
            )
            self._num_hangs = hangs_after(outcome, self._num_hangs)
            return outcome

        return settlement.of(attempt, lambda result: self._is_known(scenario, result)).then(told)

    def _begun(self, attempt: Attempt) -> tuple[Attempt, str]:
        """Return the attempt, or another one on fresh ranks if its ranks came to no end, and what is to be told.

        A busy machine has ranks give up before a scenario begins, and its kernel may kill what forks ranks: that says
        nothing of what the scenario is about.
        """
        if not (why := _never_judged(attempt)):
            return attempt, ""
        again = self._start(attempt.scenario, attempt.subject, fresh=True).wait()
        return again, f"{TRIED_AGAIN}: {why}; {'the same there' if _never_judged(again) else 'not there'}"

    def _try_again(self, scenario: Scenario, *, fresh: bool = False) -> Pending[Attempt]:
        if fresh:  # what has failed may have left something behind
            self._doubt(scenario)
        pending = self._start(scenario, self.subject, fresh=fresh)
        return pending if self.backend.runs_side_by_side else Pending.of(pending.wait())

    def _doubt(self, scenario: Scenario) -> None:
        self._ranks.retire(scenario, self._judged(scenario, self.subject))

    def _is_first(self, scenario: Scenario) -> bool:
        return self._uses.is_one(scenario) if self._first is None else scenario.id in self._first

    def _is_known(self, scenario: Scenario, result: ScenarioResult) -> bool:
        """Whether a failure is excused: whether it also comes on fresh ranks says nothing that anybody asks for."""
        excuse = self._excuses(scenario, result)
        return excuse is not None and excuse.holds

    def _is_known_to_hang(self, scenario: Scenario) -> bool:
        """Whether a hang would be excused; asked of backends only: the baselines of DDPs excuse every failure."""
        return self._is_known(scenario, ScenarioResult(self.subject.name, Verdict.HANG, 0.0, 0, (), ()))

    def _judged(self, scenario: Scenario, subject: Subject) -> Subject:
        """Return whom `scenario` judges: where it wraps nothing, the backend by itself."""
        return by_itself(self.backend.name) if get_program(scenario.program).without_ddp else subject

    def _start(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> Pending[Attempt]:
        subject = self._judged(scenario, subject)
        if reason := why_unsupported(scenario, subject, self.backend):
            return Pending.of(Attempt(scenario, subject, unsupported=reason))
        before, started = denials(), time.perf_counter()
        try:
            pending = self._ranks.start(scenario, subject, fresh=fresh)
        except Exception:
            return Pending.of(Attempt(scenario, subject, error=traceback.format_exc()))

        def attempt(seconds: float) -> Attempt | None:
            observations: Mapping[int, Observation] | None = {}
            error = ""
            try:
                observations = pending.within(seconds)
            except Exception:
                error = traceback.format_exc()
            if observations is None:
                return None
            # As the ranks say: nobody need have listened when they ended.
            duration_ns = max((seen.duration_ns for seen in observations.values()), default=0)
            duration_ms = round((duration_ns / 1e9 or time.perf_counter() - started) * 1000, 3)
            return Attempt(
                scenario, subject, observations, duration_ms, error=error, shortage=shortage_since(before)
            )  # fmt: skip

        return Pending(attempt)


def _never_judged(attempt: Attempt) -> str:
    """Return why the ranks never came to an end of their own, or to a beginning; empty if they did."""
    lost = (one.fate.detail for one in attempt.observations.values() if LOST in one.fate.detail)
    return unconnected(attempt.observations) or next(lost, "")
