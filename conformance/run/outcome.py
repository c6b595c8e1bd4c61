"""A scenario's outcome, for the subject and for torch's own DDP beside it, and the combined verdict of several."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.run.known_failures import Excuse
from conformance.scenario import Scenario, leading_requirement
from conformance.verdict import ScenarioResult, Verdict

NATIVE = "torch"  # the subject of the second column

#: By operation, then by `axis value`, such as `dtype int8`: how many cells had it, and how many of them were wrong.
#: The count of all cells stands under an empty name. Values that are the default of their axis are left out.
Tried = Mapping[str, Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Note:
    """A number that a DDP reached on rank 0 and the demand on it, such as accuracy 0.98, at least 0.95."""

    name: str
    value: float | str
    demand: str

    def __str__(self) -> str:
        """Return e.g. `accuracy 0.9688 (at least 0.95)`."""
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{self.name} {value} ({self.demand})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario's result for the subject and, unless switched off, for torch's own DDP.

    `warm`: the ranks had run something before; only warm times are worth comparing. `expectation`: the known failure
    that applied, if any. `replay`: the scenario itself, kept when it failed. `contaminated_by`: the earlier scenario
    that made the subject fail; the verdict is then that of fresh ranks. `tried`: the backend's operations that ran.
    `notes` are the subject's, `native_notes` torch's DDP's.
    """

    id: str
    requirements: tuple[str, ...]
    world_size: int
    seed: int
    sha256: str
    warm: bool
    notes: tuple[Note, ...]
    subject: ScenarioResult
    native: ScenarioResult | None
    expectation: Excuse | None
    replay: Mapping[str, Any] | None
    contaminated_by: str = ""
    tried: Tried = field(default_factory=dict)
    native_notes: tuple[Note, ...] = ()

    @staticmethod
    def of(
        scenario: Scenario,
        subject: ScenarioResult,
        native: ScenarioResult | None = None,
        *,
        notes: tuple[Note, ...] = (),
        native_notes: tuple[Note, ...] = (),
        warm: bool = False,
        excuse: Excuse | None = None,
        contaminated_by: str = "",
        tried: Tried | None = None,
    ) -> Outcome:
        """Return the outcome of `scenario`; a failure keeps the scenario in `replay`."""
        outcome = Outcome(
            scenario.id, scenario.requirements, scenario.world_size, scenario.seed, scenario.digest, warm, notes,
            subject, native, excuse, None, contaminated_by, tried or {}, native_notes,
        )  # fmt: skip
        return replace(outcome, replay=scenario.to_json()) if outcome.is_failure else outcome

    @property
    def results(self) -> tuple[ScenarioResult, ...]:
        """The result of each column that there is: the subject's, then torch's DDP's."""
        return (self.subject,) if self.native is None else (self.subject, self.native)

    @property
    def chapter(self) -> str:
        """The first part of the id."""
        return self.id.split("/", 1)[0]

    @property
    def leading_requirement(self) -> str:
        """The requirement that the id names, or the first one."""
        return leading_requirement(self.id, self.requirements)

    @property
    def broken(self) -> tuple[str, ...]:
        """The requirements that the column that failed is evidence against, the leading one first if it is among them.

        A verdict that depended on what ran before is none against another requirement than those of the scenario.
        """
        found = self.requirements if self.contaminated_by else self.failed_result.broken or self.requirements
        return tuple(sorted(found, key=lambda one: one != self.leading_requirement))

    def about(self, requirement: str) -> Outcome | None:
        """Return this outcome with the verdicts on one requirement; None if the subject's run has none on it."""
        if self.contaminated_by:
            return self if requirement in self.requirements else None
        if (verdict := self.subject.verdict_on(requirement, self.requirements)) is None:
            return None
        native = self.native
        if native is not None:
            beside = native.verdict_on(requirement, self.requirements)
            native = None if beside is None else replace(native, verdict=beside)
        return replace(self, subject=replace(self.subject, verdict=verdict), native=native)

    @property
    def is_failure(self) -> bool:
        """Whether this scenario keeps a run from being green; that torch's DDP breaks a promise does not."""
        if self.native is not None and self.native.verdict is Verdict.HARNESS_ERROR:
            return True
        return not self.expectation.holds if self.expectation is not None else self.subject.verdict.is_failure

    @property
    def is_excused(self) -> bool:
        """Whether the subject failed as it was known to."""
        return self.expectation is not None and self.expectation.holds and self.subject.verdict.is_failure

    @property
    def is_unexpected_pass(self) -> bool:
        """Whether it fails only because it passed, where a failure was known."""
        return self.is_failure and self.failed_result.verdict is Verdict.PASS

    @property
    def why(self) -> str:
        """The reason of the verdict, in one line; where a known failure expected another verdict, that too."""
        known, summary = self.expectation, self.failed_result.summary
        if known is None or known.holds:
            return summary
        return "; ".join(filter(None, (summary, known.describe(self.subject.verdict))))

    @property
    def failed_result(self) -> ScenarioResult:
        """The column that failed, the subject's unless it is torch's own that shows an error of the harness."""
        native = self.native
        if native is None or native.verdict is not Verdict.HARNESS_ERROR or self.subject.verdict.is_failure:
            return self.subject
        return native


@dataclass(frozen=True, slots=True)
class Progress:
    """A scenario starts (`outcome` is None) or has ended; `done` of `total` scenarios are over."""

    scenario: Scenario
    done: int
    total: int
    outcome: Outcome | None = None


def verdicts_of(results: Iterable[ScenarioResult | None]) -> Counter[Verdict]:
    """Return how many results have each verdict; None stands for a missing result."""
    return Counter(result.verdict for result in results if result is not None)


def combine(verdicts: Mapping[Verdict, int]) -> Verdict:
    """Return the verdict of several scenarios on one requirement: the worst, UNSUPPORTED only if none could run.

    One failure outweighs every pass, and one unknown as well.
    """
    worst = Verdict.worst([verdict for verdict in verdicts if verdict is not Verdict.UNSUPPORTED])
    return Verdict.UNSUPPORTED if not set(verdicts) - {Verdict.UNSUPPORTED} else worst


def evidence_of(outcomes: Iterable[Outcome]) -> Mapping[str, list[Outcome]]:
    """Return for each requirement the outcomes that have a verdict on it, with that verdict."""
    found: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        for requirement in dict.fromkeys((*outcome.requirements, *outcome.subject.broken)):
            if (about := outcome.about(requirement)) is not None:
                found[requirement].append(about)
    return found


def combined_text(verdicts: Mapping[Verdict, int]) -> str:
    """Return e.g. `PASS`, or when not all scenarios agree `FAIL 2 of 3`, with every verdict that is a failure named.

    Two crashes must not hide that eleven other scenarios failed: `CRASH 2, FAIL 11 of 114`. Scenarios that could not
    run are among those that there are, and named, lest they look as if they had passed: `FAIL 4 of 52, 40 unsupported`.
    """
    judged: dict[Verdict, int] = {
        one: number for one, number in verdicts.items() if number and one is not Verdict.UNSUPPORTED
    }
    if not judged:
        return Verdict.UNSUPPORTED.value
    text = combine(judged).value
    if len(judged) > 1:
        told = [one for one in reversed(Verdict) if one.is_failure and one in judged] or [combine(judged)]
        text = f"{', '.join(f'{one.value} {judged[one]}' for one in told)} of {sum(verdicts.values())}"
    skipped = verdicts.get(Verdict.UNSUPPORTED, 0)
    return f"{text}, {skipped} unsupported" if skipped else text


def reasons_unsupported(outcomes: Iterable[Outcome]) -> tuple[tuple[str, int], ...]:
    """Return why scenarios did not apply to the subject, and to how many of them each reason did, the commonest first.

    A `Finding` says the reason: the runner's, which compares what is needed with what is declared, or the program's.
    """
    skipped = (one.subject for one in outcomes if one.subject.verdict is Verdict.UNSUPPORTED)
    return tuple(Counter(result.summary or "no reason was given" for result in skipped).most_common())


def subjects_text(outcomes: Iterable[Outcome]) -> str:
    """Return what several scenarios say of the subject: as `combined_text`, with failures that were known apart."""
    outcomes = tuple(outcomes)
    excused = sum(one.is_excused for one in outcomes)
    others = verdicts_of(one.subject for one in outcomes if not one.is_excused)
    return ", ".join([combined_text(others)] * bool(others) + [f"{excused} expected to fail"] * bool(excused))


def counts_text(verdicts: Mapping[Verdict, int]) -> str:
    """Return e.g. `203 PASS, 14 FAIL`."""
    return ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict if verdicts.get(verdict))
