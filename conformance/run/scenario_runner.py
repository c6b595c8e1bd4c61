"""Runs one scenario on the subject and on torch's own DDP, and has both judged."""

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import trio

from conformance.backends.backend import Backend
from conformance.checkers.unconnected import TRIED_AGAIN, unconnected
from conformance.observation import Observation
from conformance.programs.registry import Program, get_program
from conformance.run.attempt import Attempt, Ranks, Truth, judged, starved
from conformance.run.confirmation import Confirmation, Confirmed
from conformance.run.first_uses import FirstUses
from conformance.run.interpreter import check_interpreter
from conformance.run.judge import authority_of
from conformance.run.known_failures import Excuses
from conformance.run.needs import why_unsupported
from conformance.run.outcome import NATIVE, Outcome
from conformance.run.patience import hangs_after, hurried, shortened
from conformance.run.shortage import denials, shortage_since
from conformance.run.tried import tried_in
from conformance.scenario import Scenario
from conformance.subjects.subject import KNOWN, Subject, by_itself
from conformance.verdict import ScenarioResult, Verdict
from conformance.waiting import loop
from conformance.workers.answers import LOST

#: Called with what the ranks of the subject observed.
OnObserved = Callable[[Scenario, Mapping[int, Observation]], None]


@dataclass(frozen=True)
class _Case:
    """A scenario with what is decided before it runs; the first column is the subject's."""

    scenario: Scenario
    program: Program
    subjects: tuple[Subject, ...]
    unsupported: tuple[str, ...]  # why a column cannot run, empty if it can
    first_try: Scenario  # with the deadline that the subject gets
    fresh: bool


@dataclass(frozen=True)
class _Tried:
    """The attempts of both columns, and the truth; `tried_again`: why ranks of the subject were replaced, if so."""

    attempt: Attempt
    native: Attempt | None
    beside: ScenarioResult | None
    truth: Truth
    tried_again: str


class ScenarioRunner:
    """Runs scenarios on warm ranks, several at a time if asked to, and a failure once more on fresh ones.

    The first scenario of each requirement runs on fresh ranks (`first_uses`), and so does the next one after a failure
    of the subject, whose traces ranks may not notice.
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
        self._in_turn = trio.Lock()  # see `Confirmation`
        self._first, self._uses = first, FirstUses()
        self._native = torch_ddp if native and torch_ddp.target != subject.target else None

    def run(self, scenario: Scenario) -> Outcome:
        """Run `scenario` in both columns. Only Ctrl-C escapes; whatever else happens is a verdict."""
        return loop.run(self.judge, scenario)

    async def judge(self, scenario: Scenario) -> Outcome:
        """Do what `run` does, from a coroutine, beside which others may judge other scenarios."""
        case = self._prepare(scenario)
        tried = await self._run_columns(case)
        confirmed = await self._confirm(case, tried)
        return await self._report(case, tried, confirmed)

    def _prepare(self, scenario: Scenario) -> _Case:
        self._started[scenario.id] = scenario
        program = get_program(scenario.program)
        if program.without_ddp:  # the backend is judged by itself
            subjects = [by_itself(self.backend.name)]
        else:
            subjects = [self.subject, *([self._native] if self._native is not None else [])]
        unsupported = tuple(why_unsupported(scenario, subject, self.backend) for subject in subjects)
        # Trace of backends only: the baselines of DDPs excuse every failure.
        is_known_to_hang = program.without_ddp and self._is_known(scenario, _hang(self.subject))
        first_try = shortened(scenario) if is_known_to_hang else hurried(scenario, self._num_hangs)
        fresh = not unsupported[0] and self._is_first(scenario, program)
        return _Case(scenario, program, tuple(subjects), unsupported, first_try, fresh)

    async def _run_columns(self, case: _Case) -> _Tried:
        """Have ranks run each column, and compute the truth.

        On a device one column begins when the other has ended: its memory may not hold two DDPs, and one that hangs may
        keep it busy.
        """

        async def column(place: int) -> Attempt:
            scenario, subject = case.first_try if place == 0 else case.scenario, case.subjects[place]
            if reason := case.unsupported[place]:
                return Attempt(scenario, subject, unsupported=reason)
            return await self._try(scenario, subject, fresh=case.fresh and place == 0)

        async def columns() -> list[Attempt]:
            each = [partial(column, place) for place in range(len(case.subjects))]
            return await loop.together(*each) if self.backend.runs_side_by_side else [await one() for one in each]

        async def truth() -> Truth:
            found = Truth() if all(case.unsupported) else await Truth.of(case.program, case.scenario, self._ranks)
            return await Truth.of(case.program, case.scenario, self._ranks) if LOST in found.error else found

        attempts, expected = await loop.together(columns, truth)
        (attempt, tried_again), *natives = [await self._begun(one) for one in attempts]
        native = natives[0][0] if natives else None
        beside = judged(native, case.program, expected) if native is not None else None
        return _Tried(attempt, native, beside, expected, tried_again)

    async def _begun(self, attempt: Attempt) -> tuple[Attempt, str]:
        """Return the attempt, or another one on fresh ranks if its ranks did not end by themselves, and a note on that.

        On a busy machine ranks may give up before a scenario begins, or get no processor, or the kernel may kill the
        zygote: none is a result of the scenario, and what the zygote's end has left is none the second time either.
        """
        if not (why := _never_judged(attempt)):
            return attempt, ""
        again = await self._try(attempt.scenario, attempt.subject, fresh=True)
        if LOST in (still := _never_judged(again)):
            again = replace(again, error=still)
        return again, f"{TRIED_AGAIN}: {why}; {'the same there' if still else 'not there'}"

    async def _confirm(self, case: _Case, tried: _Tried) -> Confirmed:
        """Return what counts, after another attempt of a subject that failed when warm."""
        authority = None
        if tried.native is not None and tried.beside is not None:
            authority = authority_of(case.program, tried.beside.verdict, tried.native.observations)

        async def try_again(scenario: Scenario, *, fresh: bool = False) -> Attempt:
            return (await self._begun(await self._try(scenario, case.subjects[0], fresh=fresh)))[0]

        confirmation = Confirmation(
            lambda one: judged(one, case.program, tried.truth, authority), try_again, partial(self._doubt, case),
            self._started, self._in_turn, case.program.without_ddp,
        )  # fmt: skip
        return await confirmation.of(tried.attempt, lambda result: self._is_known(case.scenario, result))

    async def _report(self, case: _Case, tried: _Tried, confirmed: Confirmed) -> Outcome:
        self._on_observed(case.scenario, confirmed.attempt.observations)
        excuse = self._excuses(case.scenario, confirmed.result)
        if confirmed.result.verdict.is_failure or confirmed.contaminated_by:
            async with self._in_turn:
                self._doubt(case, case.scenario)
        result = excuse.new_first(confirmed.result) if excuse is not None else confirmed.result
        if tried.tried_again:
            result = result.with_note(tried.tried_again)
        outcome = Outcome.of(
            case.scenario,
            result,
            tried.beside,
            notes=confirmed.attempt.notes(tried.truth),
            native_notes=tried.native.notes(tried.truth) if tried.native is not None else (),
            warm=bool(confirmed.attempt.after),
            excuse=excuse,
            contaminated_by=confirmed.contaminated_by,
            tried=tried_in(case.scenario, confirmed.attempt.observations, confirmed.result.verdict),
        )
        self._num_hangs = hangs_after(outcome, self._num_hangs)
        return outcome

    def _doubt(self, case: _Case, scenario: Scenario) -> None:
        self._ranks.retire(scenario, case.subjects[0])

    def _is_first(self, scenario: Scenario, program: Program) -> bool:
        return self._uses.is_one(scenario, program) if self._first is None else scenario.id in self._first

    def _is_known(self, scenario: Scenario, result: ScenarioResult) -> bool:
        """Whether a failure is excused; then no attempt on fresh ranks is needed."""
        excuse = self._excuses(scenario, result)
        return excuse is not None and excuse.holds

    async def _try(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> Attempt:
        """Have ranks run `scenario`, which may be another one that has run on ranks of the same kind."""
        before, started = denials(), time.perf_counter()
        observations: Mapping[int, Observation] = {}
        error = ""
        try:
            observations = await self._ranks.observe(scenario, subject, fresh)
        except Exception:
            error = traceback.format_exc()
        # As the ranks say: this process may have done something else when they ended.
        duration_ns = max((seen.duration_ns for seen in observations.values()), default=0)
        duration_ms = round((duration_ns / 1e9 or time.perf_counter() - started) * 1000, 3)
        return Attempt(scenario, subject, observations, duration_ms, error=error, shortage=shortage_since(before))


def _hang(subject: Subject) -> ScenarioResult:
    return ScenarioResult(subject.name, Verdict.HANG, 0.0, 0, (), ())


def _never_judged(attempt: Attempt) -> str:
    """Return why the ranks did not begin, or did not end by themselves; empty if they did."""
    lost = (one.fate.detail for one in attempt.observations.values() if LOST in one.fate.detail)
    return unconnected(attempt.observations) or next(lost, "") or starved(attempt.observations)
