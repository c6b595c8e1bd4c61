"""Trainings that nobody wrote down: composed by the grammar, judged like any scenario, and shrunk where they fail.

An exploration first runs trainings in which every pair of features occurs, then random ones. A failure is shrunk to the
simplest training that still fails; trainings with all of its features are then left out, so that the next failure is
another one.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from conformance.composed.choose import chosen_by
from conformance.composed.features import (
    WORLD_SIZES,
    Pair,
    all_possible_pairs,
    features,
    pairs_of,
)
from conformance.composed.grammar import cover, draw, with_newer_options, with_own_classes
from conformance.composed.simpler import shrink
from conformance.run.lanes import Enough, LaneError, in_lanes
from conformance.run.outcome import Outcome
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.verdict import Verdict
from conformance.waiting import loop

#: The plainest of them, for a first look at subject and backend.
PROBED = draw(lambda options: options[0])
#: Features of nearly every training, which explain no failure.
_COMMONPLACE = frozenset(
    {
        *("block linear", "runs always", "output tensor", "world size 1", "world size 2"),
        *("action forward:plain", "action backward:together"),
    }
)
_NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.HARNESS_ERROR)


@dataclass(frozen=True, slots=True)
class Example:
    """The `number`-th training, from 1 on, that a seed gives."""

    seed: int
    number: int
    scenario: Scenario

    def __str__(self) -> str:
        """Return the name by which it can be drawn again."""
        return f"example {self.number} of seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Judged:
    """An example that has run, `why` it has its verdict, whether every rank refused it, and its shrunk failure."""

    example: Example
    verdict: Verdict
    why: str
    was_refused: bool
    failure: Outcome | None


@dataclass(frozen=True, slots=True)
class Deviation:
    """The simplest failing training of its kind, its features, and the example that was drawn."""

    outcome: Outcome
    features: frozenset[str]
    drawn: Example
    always_fails: bool


@dataclass(slots=True)
class Exploration:
    """The result: how many examples were judged, refused on every rank, failed, or are known failures.

    `not_judged`: the examples without a verdict.
    """

    seeds: tuple[int, ...]
    num_judged: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_known: int = 0
    duration_s: float = 0.0
    deviations: list[Deviation] = field(default_factory=list)
    #: By the name of the example, the failures that were not shrunk before all ended.
    unshrunk: dict[str, Outcome] = field(default_factory=dict)
    not_judged: list[Judged] = field(default_factory=list)
    covered: set[Pair] = field(default_factory=set)
    possible: frozenset[Pair] = frozenset()
    #: Why it ended early: Ctrl-C, or the end of a lane.
    broken_by: KeyboardInterrupt | LaneError | None = None

    @property
    def missing(self) -> list[Pair]:
        """The pairs of features that no judged training had, in alphabetical order."""
        return sorted(self.possible - self.covered)

    @property
    def per_minute(self) -> float:
        """Judged trainings per minute, shrinking included."""
        return self.num_judged / self.duration_s * 60 if self.duration_s else 0.0

    def knows(self, of: frozenset[str]) -> bool:
        """Whether a failure was found that needs nothing but features in `of`."""
        return any(deviation.features <= of for deviation in self.deviations)

    def add(self, judged: Judged) -> None:
        """Count an example; a failure waits in `unshrunk` until it has been shrunk to a deviation."""
        if judged.verdict in _NOT_JUDGED:
            self.not_judged.append(judged)
            return
        self.num_judged += 1
        self.num_refused += judged.was_refused
        if judged.failure:
            self.num_failed += 1
            self.unshrunk[str(judged.example)] = judged.failure
        self.covered |= pairs_of(judged.example.scenario)


#: Makes the runner of a lane; its ranks end with the block.
OpenRunner = Callable[[], AbstractContextManager[ScenarioRunner]]


def explore(
    open_runner: OpenRunner,
    *,
    examples: int,
    seeds: Sequence[int],
    world_sizes: Sequence[int] = WORLD_SIZES,
    budget_s: float = float("inf"),
    most_failures: int = 1,
    jobs: int = 1,
    on_judged: Callable[[Judged], None] = lambda judged: None,
    on_deviation: Callable[[Deviation], None] = lambda deviation: None,
) -> Exploration:
    """Draw `examples` of each of `seeds` and run them in `jobs` lanes, for `budget_s`, until `most_failures` differ.

    A seed gives the same examples whatever the number of lanes; seeds take turns. An example whose truth is not exact,
    or that subject or backend do not support, is not judged and covers nothing. What breaks it off is in the result.
    """
    started = time.monotonic()
    found = Exploration(tuple(seeds), possible=all_possible_pairs(world_sizes))
    running: set[str] = set()

    def to_run() -> Iterator[tuple[Example]]:
        for example in _drawn(seeds, examples, world_sizes):
            if time.monotonic() - started >= budget_s:
                return
            if found.knows(features(example.scenario)):
                found.num_known += 1
                found.covered |= pairs_of(example.scenario)
                continue
            running.add(str(example))
            yield (example,)  # a batch of one

    def take(one: Judged | Deviation) -> None:
        if isinstance(one, Judged):
            running.discard(str(one.example))
            found.add(one)
            on_judged(one)
            return
        del found.unshrunk[str(one.drawn)]
        if not found.knows(one.features):  # another lane may have been faster
            found.deviations.append(one)
            on_deviation(one)
            if len(found.deviations) >= most_failures:
                raise Enough

    try:
        in_lanes(partial(_lane, open_runner), to_run(), jobs, take)
    except KeyboardInterrupt as interrupt:
        found.broken_by = interrupt
    except LaneError as error:
        found.broken_by = LaneError(f"{error}; running were: {', '.join(sorted(running)) or 'none'}")
    found.duration_s = time.monotonic() - started
    return found


def _drawn(seeds: Sequence[int], examples: int, world_sizes: Sequence[int]) -> Iterator[Example]:
    def of(seed: int) -> Iterator[Example]:
        trainings = chain(cover(seed, world_sizes=world_sizes, few_refusals=True), _random(seed, world_sizes))
        mixed = chain.from_iterable(
            zip(trainings, trainings, trainings, _beyond_pairs(seed, world_sizes), strict=False)
        )
        for number, scenario in enumerate(islice(mixed, examples), 1):
            yield Example(seed, number, scenario)

    return chain.from_iterable(zip(*map(of, seeds), strict=True))


def _beyond_pairs(seed: int, world_sizes: Sequence[int]) -> Iterator[Scenario]:
    """Yield trainings with what no pair has: these come from the beginning, for pairs last for a thousand trainings."""
    newer = random.Random(f"explored with newer options {seed}")
    classes = chosen_by(random.Random(f"explored with own classes {seed}"))
    while True:
        yield with_own_classes(draw(classes, world_sizes=world_sizes, few_refusals=True), classes)
        yield with_newer_options(draw(chosen_by(newer), world_sizes=world_sizes, few_refusals=True))


def _random(seed: int, world_sizes: Sequence[int]) -> Iterator[Scenario]:
    chooser = random.Random(f"explored {seed}")
    company = random.Random(f"explored in company {seed}")
    numerics = random.Random(f"explored with numerics {seed}")
    handling = random.Random(f"explored in handling {seed}")
    while True:
        yield draw(chosen_by(chooser), world_sizes=world_sizes, few_refusals=True)
        yield draw(chosen_by(company), world_sizes=world_sizes, special="company")
        yield draw(chosen_by(numerics), world_sizes=world_sizes, special="numerics")
        yield draw(chosen_by(handling), world_sizes=world_sizes, special="handling")


def _lane(open_runner: OpenRunner, examples: Iterator[Example], take: Callable[[Judged | Deviation], None]) -> None:
    with open_runner() as runner:
        while some := list(islice(examples, 2)):  # one runs while the other is judged
            outcomes = loop.run(loop.together, *(partial(runner.judge, one.scenario) for one in some))
            for example, outcome in zip(some, outcomes, strict=True):
                failure = outcome if _fails(outcome) else None
                take(Judged(example, outcome.subject.verdict, outcome.why, _was_refused(outcome), failure))
                if failure:
                    take(_shrunk(runner, example, outcome))


def _shrunk(runner: ScenarioRunner, example: Example, outcome: Outcome) -> Deviation:
    outcomes = {example.scenario.id: outcome}

    def still_fails(candidate: Scenario) -> bool:
        if candidate.id not in outcomes:
            outcomes[candidate.id] = runner.run(candidate)
        return _fails(outcomes[candidate.id])

    smallest = shrink(example.scenario, still_fails)
    again = runner.run(smallest)
    always = again.subject.verdict.is_failure
    kept = again if always else outcomes[smallest.id]
    return Deviation(kept, features(smallest) - _COMMONPLACE, example, always)


def _fails(outcome: Outcome) -> bool:
    return outcome.subject.verdict.is_failure and outcome.subject.verdict not in _NOT_JUDGED


def _was_refused(outcome: Outcome) -> bool:
    return not outcome.subject.verdict.is_failure and any(
        finding.checker == "refuses_together" and finding.verdict is Verdict.PASS
        for finding in outcome.subject.findings
    )
