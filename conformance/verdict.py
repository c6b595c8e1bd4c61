"""Verdicts: what a run says about the requirements it exercised. They are never conflated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from conformance.history import Collective


class Verdict(Enum):
    """One word per kind of outcome, from harmless to grave; `worst` relies on this order."""

    PASS = "PASS"
    UNSUPPORTED = "UNSUPPORTED"  # a declared capability is missing; the scenario did not run
    UNKNOWN = "UNKNOWN"  # a checker's precondition failed: no statement either way
    FAIL = "FAIL"
    HANG = "HANG"
    CRASH = "CRASH"
    HARNESS_ERROR = "HARNESS_ERROR"  # our fault, or a scenario that exercised nothing

    @property
    def is_failure(self) -> bool:
        """Whether a run with this verdict must not be green."""
        return self in (Verdict.FAIL, Verdict.HANG, Verdict.CRASH, Verdict.HARNESS_ERROR)

    @staticmethod
    def worst(verdicts: list[Verdict]) -> Verdict:
        """Return the gravest; PASS for none."""
        order = list(Verdict)
        return max(verdicts, key=order.index, default=Verdict.PASS)


@dataclass(frozen=True, slots=True)
class Finding:
    """One checker's statement about one scenario: `summary` is a sentence, `explanation` the evidence."""

    checker: str
    verdict: Verdict
    summary: str = ""
    explanation: str = ""


@dataclass(frozen=True, slots=True)
class RankFate:
    """How one rank ended, for the report; `collectives` are the last ones that it issued, oldest first."""

    rank: int
    fate: str
    phase: str = ""
    last_collective: str = ""
    stack: str = ""
    stderr: str = ""
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The verdict on one scenario for one subject, with its evidence."""

    scenario_id: str
    requirements: tuple[str, ...]
    subject: str
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    ranks: tuple[RankFate, ...] = ()
    duration_ms: float = 0.0
    num_collectives: int = 0
