"""`Verdict`: the kind of a scenario's outcome; `Finding` and `ScenarioResult`: its evidence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from conformance.observation import Collective


class Verdict(Enum):
    """The kinds of outcome, in increasing severity; `worst` relies on this order."""

    PASS = "PASS"
    UNSUPPORTED = "UNSUPPORTED"  # a declared capability is missing; the scenario did not run
    UNKNOWN = "UNKNOWN"  # a checker's precondition failed, so it could not decide
    FAIL = "FAIL"
    HANG = "HANG"
    CRASH = "CRASH"
    HARNESS_ERROR = "HARNESS_ERROR"  # a bug in the harness, an idle scenario, or a machine that denied something

    @property
    def is_failure(self) -> bool:
        """Whether a run with this verdict must not be green."""
        return self in (Verdict.FAIL, Verdict.HANG, Verdict.CRASH, Verdict.HARNESS_ERROR)

    @staticmethod
    def worst(verdicts: list[Verdict]) -> Verdict:
        """Return the most severe verdict; PASS if there are none."""
        order = list(Verdict)
        return max(verdicts, key=order.index, default=Verdict.PASS)


@dataclass(frozen=True, slots=True)
class Finding:
    """One checker's result for one scenario: `summary` is a sentence, `explanation` the evidence.

    It is about `requirements`, or else about all that the scenario tests. `mistake` is the recognised one of
    `checkers.mistakes.MISTAKES`, or empty. `wrong` has a sentence for each wrong thing, and `likeness` a word for each,
    separated by spaces, that does not depend on numbers. Both are empty where nothing compares them.
    """

    checker: str
    verdict: Verdict
    summary: str = ""
    explanation: str = ""
    requirements: tuple[str, ...] = ()
    mistake: str = ""
    likeness: str = ""
    wrong: tuple[str, ...] = ()


#: Checkers whose failure explains all others, also deaths and hangs.
_CAUSES = ("same_collectives", "same_until_refused")
#: Checkers whose failure explains wrong values: an unfinished collective or a race gives any number, and what is issued
#: in error moves them.
_EXPLAIN_VALUES = ("silent_no_sync", "no_gradients_in_flight", "nothing_in_flight", "device_is_content")


def decisive(findings: Iterable[Finding]) -> Verdict:
    """Return the verdict of the most severe of `findings`, unless another is its cause.

    After mismatched collectives it is random whether ranks die, hang, raise or average wrongly, for example by a race
    of gloo's abort against Python's next line. The verdict is that of the cause, FAIL.
    """
    found = list(findings)
    worst = Verdict.worst([one.verdict for one in found])
    caused = any(one.checker in _CAUSES and one.verdict is Verdict.FAIL for one in found)
    return Verdict.FAIL if caused and worst in (Verdict.HANG, Verdict.CRASH) else worst


def deciding(verdict: Verdict, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that led to `verdict`: causes first, then the most severe and those with evidence.

    Mismatched collectives cause wrong values, errors and deaths; unfinished collectives cause wrong values. Leaves out
    a finding whose evidence equals that of an earlier one.
    """
    found = [one for one in findings if one.verdict.is_failure or one.verdict is verdict]
    found.sort(
        key=lambda one: (
            one.checker not in _CAUSES, one.verdict is not verdict, one.checker not in _EXPLAIN_VALUES,
            not one.explanation,
        )
    )  # fmt: skip
    told = {one.explanation: one for one in reversed(found)}
    return tuple(one for one in found if not one.explanation or told[one.explanation] is one)


@dataclass(frozen=True, slots=True)
class RankFate:
    """How one rank ended, for the report; `collectives` are its last ones, oldest first."""

    rank: int
    fate: str
    phase: str = ""
    last_collective: str = ""
    stack: str = ""
    stderr: str = ""
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One subject's verdict on one scenario, with its evidence."""

    subject: str
    verdict: Verdict
    duration_ms: float
    num_collectives: int
    findings: tuple[Finding, ...]
    ranks: tuple[RankFate, ...]

    @property
    def deciding_findings(self) -> tuple[Finding, ...]:
        """The findings that led to the verdict, see `deciding`; none for PASS."""
        return () if self.verdict is Verdict.PASS else deciding(self.verdict, self.findings)

    def with_note(self, summary: str) -> ScenarioResult:
        """Return it with a finding of the runner, such as the result of another attempt."""
        return replace(self, findings=(*self.findings, Finding("runner", self.verdict, summary)))

    def headed(self, sentence: str, detail: str) -> ScenarioResult:
        """Return it with another first sentence, and `detail` above the evidence."""
        first, *_ = self.deciding_findings
        headed = replace(first, summary=sentence, explanation="\n".join(filter(None, (detail, first.explanation))))
        return replace(self, findings=tuple(headed if one is first else one for one in self.findings))

    @property
    def ways(self) -> Mapping[str, str]:
        """A sentence for each wrong thing by a word, for comparison with another run.

        For HANG and CRASH, whose place varies, and where nothing is compared, the verdict is the only word.
        """
        alike = {
            word: sentence
            for one in self.deciding_findings
            for word, sentence in zip(one.likeness.split(), one.wrong, strict=False)
            if self.verdict is Verdict.FAIL
        }
        return alike or {self.verdict.value: self.summary}

    @property
    def hung(self) -> bool:
        """Whether ranks hung, whatever the verdict is."""
        return any(one.verdict is Verdict.HANG for one in self.findings)

    @property
    def broken(self) -> tuple[str, ...]:
        """The requirements that failed findings are about; none if one of them is about all of the scenario."""
        failed = [one for one in self.findings if one.verdict.is_failure and one.checker != "runner"]
        if not all(one.requirements for one in failed):
            return ()
        return tuple(dict.fromkeys(requirement for one in failed for requirement in one.requirements))

    def verdict_on(self, requirement: str, tested: Collection[str]) -> Verdict | None:
        """Return the verdict on one requirement, `tested` or not; None if no finding is about it."""
        if not self.verdict.is_failure or not (broken := self.broken):
            return self.verdict if requirement in tested else None
        if requirement in broken:
            return self.verdict
        others = [one.verdict for one in self.findings if not one.verdict.is_failure]
        return Verdict.worst(others) if requirement in tested else None

    @property
    def summary(self) -> str:
        """Why, in one sentence."""
        return next((one.summary for one in self.deciding_findings if one.summary), "")
