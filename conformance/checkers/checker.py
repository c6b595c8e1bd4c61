"""What a checker is: a pure function from the evidence of one run to a finding, registered by name.

A checker states what it looked for and what it found. Where its precondition fails it says UNKNOWN, never PASS or FAIL;
where it has nothing to do with the run at all it returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conformance.observation import Facts, Observation
from conformance.scenario import Scenario
from conformance.verdict import Finding, Verdict

#: Ends that are death: the process was gone before it could report.
DEAD = ("killed", "exited")
#: Ends of ranks whose report is complete.
REPORTED = ("returned", "raised")


@dataclass(frozen=True)
class Evidence:
    """Everything that is known about one run of one scenario.

    `expected` holds the facts required of each rank, None where the program requires none. `native_facts` are the facts
    that torch's own DDP observed on each rank, for those names in which it is to be followed, and only if it passed.
    """

    scenario: Scenario
    observations: Mapping[int, Observation]
    expected: Mapping[int, Facts] | None = None
    native_facts: Mapping[int, Facts] | None = None

    @property
    def by_rank(self) -> list[Observation]:
        """The observations, by ascending rank."""
        return [self.observations[rank] for rank in sorted(self.observations)]

    def ended(self, *kinds: str) -> list[Observation]:
        """Return the observations of ranks whose fate is one of `kinds`."""
        return [observation for observation in self.by_rank if observation.fate.kind in kinds]

    @property
    def all_returned(self) -> bool:
        """Whether every rank ran the program to its end."""
        return len(self.ended("returned")) == len(self.observations)


Checker = Callable[[Evidence], Finding | None]

#: Every checker whose module has been imported; `registry.get_checker` sees to it that all have.
CHECKERS: dict[str, Checker] = {}


def checker(name: str) -> Callable[[Checker], Checker]:
    """Register the decorated function as checker `name`."""

    def register(check: Checker) -> Checker:
        assert name not in CHECKERS, f"two checkers are called {name}"
        CHECKERS[name] = check
        return check

    return register


def passed(name: str, summary: str = "") -> Finding:
    """Return a PASS."""
    return Finding(name, Verdict.PASS, summary)


def failed(name: str, summary: str, explanation: str = "") -> Finding:
    """Return a FAIL."""
    return Finding(name, Verdict.FAIL, summary, explanation)


def unknown(name: str, why: str) -> Finding:
    """Return UNKNOWN: the checker's precondition failed, for the reason `why`."""
    return Finding(name, Verdict.UNKNOWN, why)


def harness_error(name: str, summary: str, explanation: str = "") -> Finding:
    """Return a HARNESS_ERROR."""
    return Finding(name, Verdict.HARNESS_ERROR, summary, explanation)
