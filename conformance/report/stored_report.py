"""A report as it lies in `report.json`: frozen values with the names of the JSON's keys.

Whatever is made of a finished report (pages, merges, diffs, checks) works on these values and never runs anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conformance.bench.ratio import Ratio
from conformance.run.outcome import combine
from conformance.scenario import leading_requirement
from conformance.verdict import Finding, RankFate, Verdict, telling


@dataclass(frozen=True, slots=True)
class StoredSubject:
    """The DDP under test: the name that was typed and the `module:attr` behind it."""

    name: str
    target: str


@dataclass(frozen=True, slots=True)
class StoredNote:
    """A number that the subject reached, and what was demanded; `nan` and infinities are strings."""

    name: str
    value: float | str
    demand: str


@dataclass(frozen=True, slots=True)
class StoredResult:
    """One subject's verdict on one scenario, with its evidence."""

    subject: str
    verdict: Verdict
    duration_ms: float
    num_collectives: int
    findings: tuple[Finding, ...]
    ranks: tuple[RankFate, ...]

    @property
    def findings_that_tell(self) -> tuple[Finding, ...]:
        """The findings that made the verdict what it is, see `telling`; none for PASS."""
        return () if self.verdict is Verdict.PASS else telling(self.verdict, self.findings)

    @property
    def summary(self) -> str:
        """Why, in one sentence."""
        return next((one.summary for one in self.findings_that_tell if one.summary), "")


@dataclass(frozen=True, slots=True)
class StoredExpectation:
    """What was expected of a scenario instead of PASS, and what became of that: see `run.known_failures`."""

    status: str
    verdict: Verdict
    reason: str
    issue: str
    expires: str


@dataclass(frozen=True, slots=True)
class StoredScenario:
    """One scenario's outcome in both columns; `replay` is the scenario itself, kept when it failed."""

    id: str
    requirements: tuple[str, ...]
    world_size: int
    seed: int
    sha256: str
    warm: bool
    notes: tuple[StoredNote, ...]
    subject: StoredResult
    native: StoredResult | None
    expectation: StoredExpectation | None
    replay: Mapping[str, Any] | None

    @property
    def chapter(self) -> str:
        """The first part of the id."""
        return self.id.split("/", 1)[0]

    @property
    def leading_requirement(self) -> str:
        """The requirement that the id names, or the first one."""
        return leading_requirement(self.id, self.requirements)

    @property
    def is_failure(self) -> bool:
        """Whether this scenario keeps the report from being green."""
        if self.native is not None and self.native.verdict is Verdict.HARNESS_ERROR:
            return True
        if self.expectation is not None:
            return self.expectation.status != "met"
        return self.subject.verdict.is_failure

    @property
    def failed_result(self) -> StoredResult:
        """The column that failed, the subject's unless it is torch's own that shows an error of the harness."""
        native = self.native
        if native is None or native.verdict is not Verdict.HARNESS_ERROR or self.subject.verdict.is_failure:
            return self.subject
        return native


@dataclass(frozen=True, slots=True)
class StoredRequirement:
    """One requirement with its verdicts; `scenarios` is how many gave evidence for it."""

    id: str
    chapter: str
    level: str
    statement: str
    scenarios: int
    subject: Verdict
    native: Verdict | None


@dataclass(frozen=True, slots=True)
class StoredTotals:
    """Counts: scenarios that were selected and that ran, requirements, and verdicts of both columns."""

    selected: int
    scenarios: int
    requirements: int
    subject: Mapping[str, int]
    native: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StoredSelection:
    """What was to be run: all ids, of all shards, and which shard (`3/8`) this is; empty when there are none.

    `order` is `listed`, `reversed` or `shuffled`, and `seed` decided how scenarios were shuffled.
    """

    profile: str
    shard: str
    ids: tuple[str, ...]
    order: str = "listed"
    seed: int = 0

    @property
    def arranged(self) -> str:
        """The order in a few words, such as `shuffled with seed 7`."""
        return f"{self.order} with seed {self.seed}" if self.order == "shuffled" else self.order


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A whole `report.json`; `performance` is empty where speed was not measured."""

    schema_version: int
    tool: str
    complete: bool
    interrupted: bool
    certified: bool
    green: bool
    subject: StoredSubject
    backend: str
    environment: Mapping[str, Any]
    duration_s: float
    median_warm_scenario_ms: Mapping[str, float]
    selection: StoredSelection
    totals: StoredTotals
    requirements: tuple[StoredRequirement, ...]
    scenarios: tuple[StoredScenario, ...]
    performance: tuple[Ratio, ...] = ()

    @property
    def failures(self) -> tuple[StoredScenario, ...]:
        """The scenarios that keep the report from being green."""
        return tuple(scenario for scenario in self.scenarios if scenario.is_failure)

    @property
    def is_green(self) -> bool:
        """Whether the report shows conformance, worked out anew from its scenarios."""
        passed = any(scenario.subject.verdict is Verdict.PASS for scenario in self.scenarios)
        return self.is_complete and passed and not self.failures

    @property
    def is_complete(self) -> bool:
        """Whether every scenario that this report (or its shard) was to run has an outcome."""
        return self.complete and not self.interrupted and len(self.scenarios) == self.totals.selected

    @property
    def verdicts(self) -> Mapping[Verdict, int]:
        """How many scenarios came to each verdict, for the subject."""
        return Counter(scenario.subject.verdict for scenario in self.scenarios)

    @property
    def native_verdicts(self) -> Mapping[Verdict, int]:
        """How many scenarios came to each verdict, for torch's own DDP; empty when it was not run."""
        return Counter(scenario.native.verdict for scenario in self.scenarios if scenario.native is not None)

    @property
    def chapters(self) -> tuple[str, ...]:
        """The chapters' names in the order of the requirements."""
        return tuple(dict.fromkeys(requirement.chapter for requirement in self.requirements))

    def package_version(self, name: str) -> str:
        """Return the version of a package in the environment of the run, or nothing."""
        packages = self.environment.get("packages")
        return str(packages.get(name, "")) if isinstance(packages, Mapping) else ""


def summarised(requirement: StoredRequirement, scenarios: tuple[StoredScenario, ...]) -> StoredRequirement:
    """Return `requirement` with counts and verdicts worked out anew from `scenarios`."""
    relevant = [scenario for scenario in scenarios if requirement.id in scenario.requirements]
    native = Counter(scenario.native.verdict for scenario in relevant if scenario.native is not None)
    return StoredRequirement(
        requirement.id,
        requirement.chapter,
        requirement.level,
        requirement.statement,
        len(relevant),
        combine(Counter(scenario.subject.verdict for scenario in relevant)),
        combine(native) if native else None,
    )
