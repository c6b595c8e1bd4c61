"""What a run found, as values: per scenario the subject's result beside torch's own DDP, and summaries of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.bench.ratio import Ratio
from conformance.run.known_failures import Expected
from conformance.run.order import LISTED, Order
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue, Requirement
from conformance.verdict import ScenarioResult, Verdict

NATIVE = "torch"  # the subject of the second column


@dataclass(frozen=True, slots=True)
class Note:
    """A number that the subject reached on rank 0 and what is demanded of it, such as accuracy 0.98, at least 0.95."""

    name: str
    value: float
    demand: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario's result for the subject and, unless switched off, for torch's own DDP.

    `warm` tells whether the ranks had run something before; only warm times are worth comparing. `expected` is what was
    known about the scenario beforehand, if anything.
    """

    scenario: Scenario
    result: ScenarioResult
    native: ScenarioResult | None = None
    notes: tuple[Note, ...] = ()
    warm: bool = False
    expected: Expected | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A scenario starts (`outcome` is None) or has ended; `done` of `total` scenarios are over."""

    scenario: Scenario
    done: int
    total: int
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class RequirementSummary:
    """All evidence for one requirement: how many scenarios came to which verdict, for both columns."""

    requirement: Requirement
    verdicts: Mapping[Verdict, int]
    native_verdicts: Mapping[Verdict, int]

    @property
    def num_scenarios(self) -> int:
        """How many scenarios of this run exercised the requirement."""
        return sum(self.verdicts.values())

    @property
    def verdict(self) -> Verdict:
        """The subject's verdict."""
        return combine(self.verdicts)

    @property
    def native_verdict(self) -> Verdict | None:
        """The verdict of torch's own DDP, None when it was not run."""
        return combine(self.native_verdicts) if self.native_verdicts else None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a run was asked for: `ids` of all shards, the `shard` that is its own (`3/8`), and the `profile` if any.

    A `certified` run took a whole profile, with nothing left out and nothing excused. `order` is how scenarios ran.
    """

    ids: tuple[str, ...] = ()
    profile: str = ""
    shard: str = ""
    certified: bool = False
    order: Order = LISTED


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run: one outcome for each of `num_selected` scenarios, or fewer when something stopped it early.

    `performance` are step times beside torch's DDP, where they were asked for.
    """

    subject: str
    subject_target: str
    backend: str
    outcomes: tuple[Outcome, ...]
    num_selected: int
    interrupted: bool = False
    duration_s: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    assignment: Assignment = field(default_factory=Assignment)
    performance: tuple[Ratio, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every selected scenario has an outcome."""
        return len(self.outcomes) == self.num_selected

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """Outcomes that must not be green: the subject failed, or the harness did in either column."""
        return tuple(outcome for outcome in self.outcomes if is_failure(outcome))

    @property
    def totals(self) -> Mapping[Verdict, int]:
        """How many scenarios came to each verdict, for the subject."""
        return Counter(outcome.result.verdict for outcome in self.outcomes)

    @property
    def native_totals(self) -> Mapping[Verdict, int]:
        """How many scenarios came to each verdict, for torch's own DDP."""
        return Counter(outcome.native.verdict for outcome in self.outcomes if outcome.native is not None)

    @property
    def is_green(self) -> bool:
        """Whether the run shows conformance: it is complete, nothing failed, and something passed."""
        return self.complete and not self.failures and self.totals.get(Verdict.PASS, 0) > 0

    def median_warm_ms(self) -> Mapping[int, float]:
        """Return the median time of the subject's warm scenarios in milliseconds, by world size."""
        times: dict[int, list[float]] = {}
        for outcome in self.outcomes:
            if outcome.warm:
                times.setdefault(outcome.scenario.world_size, []).append(outcome.result.duration_ms)
        return {world_size: statistics.median(times[world_size]) for world_size in sorted(times)}

    def summaries(self, catalogue: Catalogue) -> tuple[RequirementSummary, ...]:
        """Return one summary per requirement that this run exercised, in the catalogue's order."""
        return tuple(
            summary for requirement in catalogue if (summary := summarise(requirement, self.outcomes)).num_scenarios > 0
        )


def is_failure(outcome: Outcome) -> bool:
    """Whether `outcome` keeps a run from being green; that torch's DDP breaks a promise does not."""
    if outcome.native is not None and outcome.native.verdict is Verdict.HARNESS_ERROR:
        return True
    return outcome.expected.is_failure if outcome.expected is not None else outcome.result.verdict.is_failure


def summarise(requirement: Requirement, outcomes: Iterable[Outcome]) -> RequirementSummary:
    """Count the verdicts of the scenarios that name `requirement`."""
    relevant = [outcome for outcome in outcomes if requirement.id in outcome.scenario.requirements]
    return RequirementSummary(
        requirement,
        Counter(outcome.result.verdict for outcome in relevant),
        Counter(outcome.native.verdict for outcome in relevant if outcome.native is not None),
    )


def counts(verdicts: Mapping[Verdict, int]) -> dict[str, int]:
    """Return every verdict's count by name, zeros included (a reader must not guess); nothing for nothing."""
    return {verdict.value: verdicts.get(verdict, 0) for verdict in Verdict} if verdicts else {}


def combine(verdicts: Mapping[Verdict, int]) -> Verdict:
    """Return what several scenarios say together about one requirement.

    One failure outweighs every pass, and one unknown as well. A scenario that could not run here takes nothing away
    from those that did, so UNSUPPORTED is the answer only when none ran.
    """
    worst = Verdict.worst([verdict for verdict in verdicts if verdict is not Verdict.UNSUPPORTED])
    return Verdict.UNSUPPORTED if not set(verdicts) - {Verdict.UNSUPPORTED} else worst
