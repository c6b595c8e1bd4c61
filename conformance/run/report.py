"""The report of a run as one frozen value, whose fields have the names of the keys in `report.json`.

Pages, merges, diffs and checks work on this value and never run anything. `green`, the counts and the requirements
follow from the outcomes and are stored as well: a report that was read from a file may contradict itself.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from conformance.bench.ratio import Ratio
from conformance.checkers.explanation import counted
from conformance.run.outcome import Outcome, combine, counts_text, evidence_of, verdicts_of
from conformance.spec.catalogue import LEVELS, Requirement
from conformance.spec.profile import levels_of
from conformance.verdict import Verdict

if TYPE_CHECKING:
    from conformance.subjects.subject import Subject

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class JudgedSubject:
    """The DDP under test: its name, the `module:attr` behind it, and what was typed for it if that is not its name.

    A backend that was judged by itself has its own name, and no `target`.
    """

    name: str
    target: str
    source: str = ""

    @property
    def typed(self) -> str:
        """What `--ddp` takes to name this subject; nothing for one that is no DDP."""
        return self.source or (self.name if self.target else "")

    @staticmethod
    def of(subject: Subject) -> JudgedSubject:
        """Return what a report says of `subject`."""
        return JudgedSubject(subject.name, subject.target, subject.source)


@dataclass(frozen=True, slots=True)
class RequirementSummary:
    """One requirement with its verdicts; `scenarios` is how many gave evidence for it."""

    id: str
    chapter: str
    level: str
    statement: str
    scenarios: int
    subject: Verdict
    native: Verdict | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts: scenarios that were selected and that ran, requirements, and verdicts of both columns."""

    selected: int
    scenarios: int
    requirements: int
    subject: Mapping[str, int]
    native: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Assignment:
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
class Report:
    """A whole run, or several shards of one: what was judged, where, and the outcome of every scenario.

    A `certified` run took a whole profile, with nothing left out and nothing excused. `performance` are step times
    beside torch's DDP, empty where they were not measured. `specification` is the version of the specification that the
    run was limited to, empty for the requirements of the release.
    """

    schema_version: int
    tool: str
    complete: bool
    interrupted: bool
    certified: bool
    green: bool
    subject: JudgedSubject
    backend: str
    environment: Mapping[str, Any]
    duration_s: float
    median_warm_scenario_ms: Mapping[str, float]
    selection: Assignment
    totals: Totals
    requirements: tuple[RequirementSummary, ...]
    scenarios: tuple[Outcome, ...]
    performance: tuple[Ratio, ...] = ()
    specification: str = ""

    @staticmethod
    def of(
        outcomes: Iterable[Outcome],
        requirements: Iterable[Requirement | RequirementSummary],
        *,
        subject: JudgedSubject,
        backend: str,
        num_selected: int,
        interrupted: bool = False,
        certified: bool = False,
        environment: Mapping[str, Any],
        duration_s: float,
        selection: Assignment | None = None,
        performance: tuple[Ratio, ...] = (),
    ) -> Report:
        """Return the report of a run: one outcome for each of `num_selected` scenarios, or fewer when it ended early.

        Of `requirements` it holds those that some scenario exercised.
        """
        outcomes = tuple(outcomes)
        evidence = evidence_of(outcomes)
        summaries = tuple(summarise(each, evidence[each.id]) for each in requirements if each.id in evidence)
        subjects, natives = verdicts_of(one.subject for one in outcomes), verdicts_of(one.native for one in outcomes)
        totals = Totals(num_selected, len(outcomes), len(summaries), counts(subjects), counts(natives))
        report = Report(
            schema_version=SCHEMA_VERSION,
            tool="ddp-conformance",
            complete=len(outcomes) == num_selected,
            interrupted=interrupted,
            certified=certified,
            green=False,
            subject=subject,
            backend=backend,
            environment=environment,
            duration_s=round(duration_s, 3),
            median_warm_scenario_ms=_median_warm_ms(outcomes),
            selection=selection or Assignment("", "", ()),
            totals=totals,
            requirements=summaries,
            scenarios=outcomes,
            performance=performance,
        )
        return replace(report, green=report.is_green)

    def extended(self, others: Iterable[Outcome], requirements: Iterable[Requirement | RequirementSummary]) -> Report:
        """Return this report with further outcomes, such as of an earlier run of the selection that was interrupted."""
        found = {one.id: one for one in (*others, *self.scenarios)}
        place = {scenario_id: number for number, scenario_id in enumerate(self.selection.ids)}
        whole = Report.of(
            sorted(found.values(), key=lambda one: place.get(one.id, len(place))), requirements, subject=self.subject,
            backend=self.backend, num_selected=self.totals.selected, interrupted=self.interrupted,
            environment=self.environment, duration_s=self.duration_s, selection=self.selection,
            performance=self.performance,
        )  # fmt: skip
        return replace(whole, specification=self.specification)

    @property
    def is_about_backend(self) -> bool:
        """Whether a backend was judged by itself, without a DDP."""
        return not self.subject.target

    @property
    def tested(self) -> str:
        """What was judged: `my_pkg:MyDDP over gloo`, or a backend's name."""
        return self.subject.name if self.is_about_backend else f"{self.subject.name} over {self.backend}"

    @property
    def short_name(self) -> str:
        """The subject's name without its module."""
        return self.subject.name.rpartition(":")[2]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The scenarios that keep the report from being green."""
        return tuple(outcome for outcome in self.scenarios if outcome.is_failure)

    @property
    def is_green(self) -> bool:
        """Whether the report shows conformance, worked out anew: it is complete, nothing failed, something passed.

        A verdict that depended on what ran before shows none either.
        """
        return self.is_complete and not self.failures and not self.contaminated and self.verdicts[Verdict.PASS] > 0

    @property
    def owed(self) -> tuple[RequirementSummary, ...]:
        """The requirements that a DDP owes at the level of the run; a scenario may be evidence for others as well."""
        profile = self.selection.profile
        levels = levels_of(profile) if profile in LEVELS else LEVELS
        return tuple(one for one in self.requirements if one.level in levels)

    @property
    def contaminated(self) -> tuple[Outcome, ...]:
        """The scenarios whose verdict depended on what the same ranks had run before."""
        return tuple(outcome for outcome in self.scenarios if outcome.contaminated_by)

    @property
    def is_complete(self) -> bool:
        """Whether every scenario that this report (or its shard) was to run has an outcome."""
        return self.complete and not self.interrupted and len(self.scenarios) == self.totals.selected

    @property
    def num_not_run(self) -> int:
        """How many scenarios were selected and have no outcome."""
        return self.totals.selected - len(self.scenarios)

    @property
    def num_excused(self) -> int:
        """How many failures were known and are excused."""
        return sum(one.is_excused for one in self.scenarios)

    @property
    def num_unexpected_passes(self) -> int:
        """How many scenarios passed that were known to fail; a report that has any is not green."""
        return sum(one.is_unexpected_pass for one in self.scenarios)

    @property
    def counts(self) -> str:
        """How many scenarios have which verdict, for the subject, such as `203 PASS, 14 FAIL, 2 expected failures`."""
        others = counts_text(verdicts_of(one.subject for one in self.scenarios if not one.is_excused))
        known = [counted(self.num_excused, "expected failure")] if self.num_excused else []
        return ", ".join([others] * bool(others) + known)

    @property
    def verdicts(self) -> Counter[Verdict]:
        """How many scenarios have each verdict, for the subject."""
        return verdicts_of(outcome.subject for outcome in self.scenarios)

    @property
    def native_verdicts(self) -> Counter[Verdict]:
        """How many scenarios have each verdict, for torch's own DDP; empty when it was not run."""
        return verdicts_of(outcome.native for outcome in self.scenarios)

    @property
    def chapters(self) -> tuple[str, ...]:
        """The chapters' names in the order of the requirements."""
        return tuple(dict.fromkeys(requirement.chapter for requirement in self.requirements))

    def package_version(self, name: str) -> str:
        """Return the version of a package in the environment of the run, or nothing."""
        packages = self.environment.get("packages")
        return str(packages.get(name, "")) if isinstance(packages, Mapping) else ""

    def source_hash(self, of: str) -> str:
        """Return the hash of the files of the `suite` or of the `subject`, or nothing; certified runs have them."""
        sources = self.environment.get("sources")
        return str(sources.get(of, "")) if isinstance(sources, Mapping) else ""


def summarise(requirement: Requirement | RequirementSummary, relevant: Sequence[Outcome]) -> RequirementSummary:
    """Return `requirement` with count and verdicts of the outcomes that give evidence for it."""
    native = verdicts_of(outcome.native for outcome in relevant)
    return RequirementSummary(
        requirement.id,
        requirement.chapter,
        requirement.level,
        requirement.statement,
        len(relevant),
        combine(verdicts_of(outcome.subject for outcome in relevant)),
        combine(native) if native else None,
    )


def counts(verdicts: Mapping[Verdict, int]) -> dict[str, int]:
    """Return every verdict's count by name, zeros included (a reader must not guess); nothing for nothing."""
    return {verdict.value: verdicts.get(verdict, 0) for verdict in Verdict} if verdicts else {}


def _median_warm_ms(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return the median time of the subject's warm scenarios in milliseconds, by world size."""
    times: dict[int, list[float]] = {}
    for outcome in outcomes:
        if outcome.warm:
            times.setdefault(outcome.world_size, []).append(outcome.subject.duration_ms)
    return {str(world_size): round(statistics.median(times[world_size]), 3) for world_size in sorted(times)}
