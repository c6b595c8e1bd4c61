"""How a test ended: on each rank, and as a whole."""

from dataclasses import dataclass
from enum import StrEnum

from conformance.errors import certain


class TestOutcome(StrEnum):
    """How a test ended, on one rank or on all of them."""

    __test__ = False  # for pytest, which takes any class of this name for a test

    PASSED = "passed"
    SKIPPED = "skipped"
    #: The test passed without constructing a DDP, and so does not test it. An outcome of tests, never of ranks.
    IDLE = "idle"
    FAILED = "failed"
    #: The process ended without reporting: by a signal, or by an exit that no test asks for.
    CRASHED = "crashed"
    HUNG = "hung"
    #: The harness ended the rank because another rank had failed. An outcome of ranks, never of tests.
    STOPPED = "stopped"

    @property
    def is_failure(self) -> bool:
        """Whether a rank that ends like this fails the test by itself."""
        return self in (TestOutcome.FAILED, TestOutcome.CRASHED, TestOutcome.HUNG)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of one rank.

    `cause` says in a few lines why it did not pass, and `detail` all there is: the traceback, the stacks of all threads
    when it hung, the last output when it crashed. `num_constructed` counts the DDPs that it asked for.
    """

    rank: int
    outcome: TestOutcome
    cause: str = ""
    detail: str = ""
    num_constructed: int = 0


@dataclass(frozen=True, slots=True, order=True)
class TestName:
    """One test method of one suite."""

    __test__ = False

    suite: str
    method: str

    def __str__(self) -> str:
        return f"{self.suite}::{self.method}"


@dataclass(frozen=True, slots=True)
class TestRun:
    """One test, run once; `ends` are in the order in which the ranks ended."""

    __test__ = False

    name: TestName
    world_size: int
    ends: tuple[RankEnd, ...]
    seconds: float = 0.0

    @property
    def outcome(self) -> TestOutcome:
        """How the test as a whole ended."""
        return combine(self.ends)

    @property
    def culprit(self) -> RankEnd | None:
        """The rank that failed first, because it probably caused the later failures; None if no rank failed."""
        return next((end for end in self.ends if end.outcome.is_failure), None)

    @property
    def explanation(self) -> str:
        """Why the test did not pass, in a few lines; empty when it did."""
        if self.outcome is TestOutcome.PASSED:
            return ""
        if self.outcome is TestOutcome.IDLE:
            return "no rank constructed a DDP"
        if self.culprit is not None:
            return f"rank {self.culprit.rank} {self.culprit.outcome}: {self.culprit.cause}"
        if self.outcome is TestOutcome.SKIPPED:
            return self.ends[0].cause
        return "ranks disagree: " + ", ".join(f"rank {end.rank} {end.outcome}" for end in self.ends)


def combine(ends: tuple[RankEnd, ...]) -> TestOutcome:
    """Return the outcome of a test from those of all its ranks, in the order in which they ended.

    One rank that does not pass is enough: torch's own runner looks at rank 0 and forgives the others. A test that some
    ranks skip and others pass has failed, because the ranks disagree.
    """
    certain(bool(ends), "a test has at least one rank")
    for end in ends:
        if end.outcome.is_failure:
            return end.outcome
    outcomes = {end.outcome for end in ends}
    if outcomes == {TestOutcome.SKIPPED}:
        return TestOutcome.SKIPPED
    if outcomes != {TestOutcome.PASSED}:
        return TestOutcome.FAILED
    return TestOutcome.PASSED if any(end.num_constructed for end in ends) else TestOutcome.IDLE
