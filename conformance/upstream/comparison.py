"""Compares which of torch's DDP tests the DDP under test passes with those that torch's DDP passes."""

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.errors import certain
from conformance.upstream.outcome import TestName, TestOutcome, TestRun


@dataclass(frozen=True, slots=True)
class Row:
    """One test with both DDPs; `exclusion` is the reason why it does not count, if it does not."""

    native: TestRun
    subject: TestRun
    exclusion: str = ""

    @property
    def name(self) -> TestName:
        """The test."""
        return self.native.name

    @property
    def counts(self) -> bool:
        """Whether the subject must pass this test."""
        return self.native.outcome is TestOutcome.PASSED and not self.exclusion

    @property
    def is_missing(self) -> bool:
        """Whether the subject must pass this test and does not."""
        return self.counts and self.subject.outcome is not TestOutcome.PASSED

    @property
    def is_ahead(self) -> bool:
        """Whether the subject passes this test and torch's DDP does not."""
        return self.native.outcome is not TestOutcome.PASSED and self.subject.outcome is TestOutcome.PASSED


@dataclass(frozen=True, slots=True)
class Comparison:
    """All tests with both DDPs, in order."""

    subject: str
    rows: tuple[Row, ...]

    @property
    def counted(self) -> tuple[Row, ...]:
        """The tests that the subject must pass."""
        return tuple(row for row in self.rows if row.counts)

    @property
    def missing(self) -> tuple[Row, ...]:
        """The tests that the subject must pass and does not."""
        return tuple(row for row in self.rows if row.is_missing)

    @property
    def ahead(self) -> tuple[Row, ...]:
        """The tests that the subject passes and torch's DDP does not."""
        return tuple(row for row in self.rows if row.is_ahead)

    @property
    def excluded(self) -> tuple[Row, ...]:
        """The excluded tests that torch's DDP passes."""
        return tuple(row for row in self.rows if row.exclusion and row.native.outcome is TestOutcome.PASSED)

    @property
    def conforms(self) -> bool:
        """Whether the subject passes every test that counts. False if there is none: such a run shows nothing."""
        return bool(self.counted) and not self.missing


def compare(
    subject: str,
    native: Mapping[TestName, TestRun],
    tested: Mapping[TestName, TestRun],
    exclusions: Mapping[TestName, str],
) -> Comparison:
    """Pair the runs of each test with torch's DDP and with the subject."""
    certain(native.keys() == tested.keys(), "both DDPs run the same tests")
    return Comparison(
        subject, tuple(Row(native[name], tested[name], exclusions.get(name, "")) for name in sorted(native))
    )
