"""Which requirement a reader should look at first: the gravest verdict, then the one that fails most throughout.

A DDP that forgets to broadcast buffers breaks every scenario about buffers and the few about gradients whose model has
some. The share of failed scenarios therefore names the cause before its consequences. A DDP that leaves a thread behind
breaks every scenario that looks for such traces; what they are about is not to blame, as their findings say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.verdict import Verdict


def blamed(outcome: Outcome) -> str:
    """Return the requirement to which a failure is to be put down first: that of the id, unless it is not broken."""
    return outcome.broken[0]


@dataclass(frozen=True, slots=True)
class Failed:
    """A requirement that failed in `outcomes`, the gravest first, of the `total` scenarios of it that ran."""

    requirement: str
    outcomes: tuple[Outcome, ...]
    total: int

    @property
    def verdict(self) -> Verdict:
        """The gravest verdict."""
        return self.outcomes[0].failed_result.verdict

    @property
    def count(self) -> str:
        """Return e.g. `4 of 40`."""
        return f"{len(self.outcomes)} of {self.total}"


def gravity(outcome: Outcome) -> int:
    """Return how grave a failure is; a larger number is graver."""
    return list(Verdict).index(outcome.failed_result.verdict)


def failed_requirements(report: Report) -> tuple[Failed, ...]:
    """Return the requirements that failed, in the order in which a reader should look at them.

    Unexpected passes are apart: a requirement that has failures too is there twice.
    """
    ran: dict[str, int] = {}
    for outcome in report.scenarios:
        if outcome.subject.verdict is Verdict.UNSUPPORTED and not outcome.is_failure:
            continue
        requirement = blamed(outcome) if outcome.is_failure else outcome.leading_requirement
        ran[requirement] = ran.get(requirement, 0) + 1
    failed: dict[tuple[str, bool], list[Outcome]] = {}
    for outcome in report.failures:
        failed.setdefault((blamed(outcome), outcome.is_unexpected_pass), []).append(outcome)
    found = [Failed(each, _gravest_first(outcomes), ran[each]) for (each, _), outcomes in failed.items()]
    return tuple(
        sorted(found, key=lambda one: (-gravity(one.outcomes[0]), -len(one.outcomes) / one.total, -len(one.outcomes)))
    )


def _gravest_first(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    return tuple(sorted(outcomes, key=lambda outcome: -gravity(outcome)))
