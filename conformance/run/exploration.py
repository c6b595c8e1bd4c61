"""Trainings that nobody wrote down: composed by the grammar, judged like any scenario, and shrunk where they fail.

An exploration first runs trainings in which every pair of features occurs, then random ones. A failure is shrunk to the
simplest training that still fails; trainings with all of its features are then left out, so that the next failure is
another one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from conformance.composed.choose import chosen_by
from conformance.composed.features import (
    WORLD_SIZES,
    Pair,
    all_possible_pairs,
    features,
    pairs_of,
)
from conformance.composed.grammar import cover, draw
from conformance.composed.simpler import shrink
from conformance.run.outcome import Outcome
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.verdict import Verdict

#: The plainest of them, for a first look at subject and backend.
PROBED = draw(lambda options: options[0])
#: What nearly every training has, so that it tells nothing about a failure.
_COMMONPLACE = frozenset(
    {
        *("block linear", "runs always", "output tensor", "world size 1", "world size 2"),
        *("action forward:plain", "action backward:together"),
    }
)
_NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.HARNESS_ERROR)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The simplest failing training of its kind, its features, and the training that was drawn."""

    outcome: Outcome
    features: frozenset[str]
    drawn: Scenario
    always_fails: bool
    num_runs_before: int


@dataclass(slots=True)
class Exploration:
    """What came of it: how many trainings were judged, refused on every rank, not judged, and left out as known."""

    seed: int
    num_judged: int = 0
    num_refused: int = 0
    num_not_judged: int = 0
    num_known: int = 0
    duration_s: float = 0.0
    deviations: list[Deviation] = field(default_factory=list)
    covered: set[Pair] = field(default_factory=set)
    possible: frozenset[Pair] = frozenset()

    @property
    def missing(self) -> list[Pair]:
        """The pairs of features that no judged training had, in alphabetical order."""
        return sorted(self.possible - self.covered)

    @property
    def per_minute(self) -> float:
        """Judged trainings per minute, shrinking included."""
        return self.num_judged / self.duration_s * 60 if self.duration_s else 0.0


OnOutcome = Callable[[Scenario, Outcome], None]


def explore(
    runner: ScenarioRunner,
    *,
    examples: int,
    seed: int,
    world_sizes: Sequence[int] = WORLD_SIZES,
    budget_s: float = float("inf"),
    most_failures: int = 1,
    on_outcome: OnOutcome = lambda scenario, outcome: None,
    on_deviation: Callable[[Deviation], None] = lambda deviation: None,
) -> Exploration:
    """Run up to `examples` trainings on `runner`, for `budget_s` seconds, until `most_failures` different ones fail.

    The same `seed` gives the same trainings. A training whose truth is not exact, or that subject or backend do not
    support, is not judged and covers nothing.
    """
    started = time.monotonic()
    found = Exploration(seed, possible=all_possible_pairs(world_sizes))
    trainings = chain(cover(seed, world_sizes=world_sizes, few_refusals=True), _random(seed, world_sizes))
    for scenario in trainings:
        found.duration_s = time.monotonic() - started
        if found.num_judged >= examples or found.duration_s >= budget_s or found.num_not_judged > 10 * examples:
            break
        if any(deviation.features <= features(scenario) for deviation in found.deviations):
            found.num_known += 1
            found.covered |= pairs_of(scenario)
            if found.num_known > 10 * examples:
                break
            continue
        outcome = runner.run(scenario)
        on_outcome(scenario, outcome)
        if outcome.subject.verdict in _NOT_JUDGED:
            found.num_not_judged += 1
            continue
        found.num_judged += 1
        found.num_refused += _was_refused(outcome)
        found.covered |= pairs_of(scenario)
        if outcome.subject.verdict.is_failure:
            found.deviations.append(_shrunk(runner, scenario, outcome, found.num_judged, on_outcome))
            on_deviation(found.deviations[-1])
            if len(found.deviations) >= most_failures:
                break
    found.duration_s = time.monotonic() - started
    return found


def _random(seed: int, world_sizes: Sequence[int]) -> Iterator[Scenario]:
    chooser = random.Random(f"explored {seed}")
    company = random.Random(f"explored in company {seed}")
    numerics = random.Random(f"explored with numerics {seed}")
    while True:
        yield draw(chosen_by(chooser), world_sizes=world_sizes, few_refusals=True)
        yield draw(chosen_by(company), world_sizes=world_sizes, special="company")
        yield draw(chosen_by(numerics), world_sizes=world_sizes, special="numerics")


def _shrunk(
    runner: ScenarioRunner, scenario: Scenario, outcome: Outcome, num_runs: int, on_outcome: OnOutcome
) -> Deviation:
    outcomes = {scenario.id: outcome}

    def still_fails(candidate: Scenario) -> bool:
        if candidate.id not in outcomes:
            outcomes[candidate.id] = runner.run(candidate)
            on_outcome(candidate, outcomes[candidate.id])
        verdict = outcomes[candidate.id].subject.verdict
        return verdict.is_failure and verdict not in _NOT_JUDGED

    smallest = shrink(scenario, still_fails)
    again = runner.run(smallest)
    always = again.subject.verdict.is_failure
    kept = again if always else outcomes[smallest.id]
    return Deviation(kept, features(smallest) - _COMMONPLACE, scenario, always, num_runs)


def _was_refused(outcome: Outcome) -> bool:
    return not outcome.subject.verdict.is_failure and any(
        finding.checker == "refuses_together" and finding.verdict is Verdict.PASS
        for finding in outcome.subject.findings
    )
