"""`Attempt` and `Truth`: the observations of ranks in a scenario, the expected ones, and the verdict."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from conformance.checkers.checker import harness_error
from conformance.checkers.facts import is_bound
from conformance.observation import Facts, Observation
from conformance.programs.registry import Program
from conformance.run.judge import judge
from conformance.run.outcome import Note
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject
from conformance.verdict import Finding, RankFate, ScenarioResult, Verdict

#: So many of a rank's last collectives go into the report of a scenario that did not pass: enough for a timeline.
NUM_KEPT_COLLECTIVES = 40


class Ranks(Protocol):
    """What runs a scenario on ranks: a `Controller`, or a stand-in in tests."""

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        """Run the scenario, with `fresh` on ranks that have run nothing yet, and return what every rank observed."""

    def retire(self, scenario: Scenario, subject: Subject) -> None:
        """Let the ranks that could run `scenario` on the subject run no further one: they are in doubt."""

    async def expect(self, scenario: Scenario) -> Mapping[int, Facts]:
        """Compute the facts that every rank must show."""


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
            Note(name, observed[name], str(demand))
            for name, demand in truth.facts[0].items()
            if is_bound(demand) and "/" not in name and type(observed.get(name)) in (int, float)
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
    async def of(program: Program, scenario: Scenario, ranks: Ranks) -> Truth:
        """Have `ranks` compute the program's expectation; an error in it is the harness's failure, kept as text."""
        if program.expectation is None:
            return Truth()
        try:
            return Truth(await ranks.expect(scenario))
        except Exception:
            return Truth(error=traceback.format_exc())


def judged(
    attempt: Attempt, program: Program, truth: Truth, authority: Mapping[int, Facts] | None = None
) -> ScenarioResult:
    """Return the verdict on `attempt`; `authority` are the facts in which torch's own DDP is to be followed."""
    if attempt.unsupported:
        return attempt.result(Verdict.UNSUPPORTED, (Finding("runner", Verdict.UNSUPPORTED, attempt.unsupported),))
    # Where ranks did not even return, how they ended is the verdict, also on a backend that gives no rank a group;
    # unless the program raises as much without a DDP: then it is no program to judge one by.
    returned = all(one.fate.kind == "returned" for one in attempt.observations.values())
    error = attempt.error or (truth.error if returned or _raise_as(truth, attempt.observations) else "")
    if not error:
        try:
            verdict, findings = judge(attempt.scenario, program, attempt.observations, truth.facts, authority)
        except Exception:
            error = traceback.format_exc()
        else:
            shortage = attempt.shortage or (starved(attempt.observations) if verdict is Verdict.HANG else "")
            if not (verdict.is_failure and shortage):
                return attempt.result(verdict, findings)
            summary = f"the verdict would be {verdict.value}, but {shortage}"
            return attempt.result(Verdict.HARNESS_ERROR, (harness_error("runner", summary), *findings))
    summary = f"the harness itself failed: {error.strip().splitlines()[-1]}"
    return attempt.result(Verdict.HARNESS_ERROR, (Finding("runner", Verdict.HARNESS_ERROR, summary, error.strip()),))


def starved(observations: Mapping[int, Observation]) -> str:
    """Return that a busy machine gave ranks hardly a processor, if some of them did not end for that; else nothing."""
    return next(filter(None, (seen.starved for seen in observations.values())), "")


def _raise_as(truth: Truth, observations: Mapping[int, Observation]) -> bool:
    """Whether a rank has raised the error with which the truth could not be computed."""
    return any(one.raised is not None and str(one.raised) in truth.error for one in observations.values())


def _rank_fate(observation: Observation) -> RankFate:
    history, raised = observation.history, observation.raised
    return RankFate(
        rank=observation.rank,
        fate=str(raised or observation.fate) + (f", on {observation.host}" if observation.host else ""),
        phase=observation.phase,
        last_collective=history[-1].describe() if history else "",
        stack=observation.stack or (raised.traceback if raised else ""),
        stderr=observation.stderr if observation.fate.kind != "returned" else "",
        collectives=history[-NUM_KEPT_COLLECTIVES:],
    )
