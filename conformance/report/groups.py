"""The answer by groups of requirements, the chapters: how many of those that apply passed, undeclared ones apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from conformance.run.report import Report
from conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Group:
    """How many requirements of a chapter passed, of those that apply; `undeclared` ones need what is not declared."""

    chapter: str
    passed: int
    applicable: int
    undeclared: int

    def __str__(self) -> str:
        """Return e.g. `12 of 13, 2 undeclared`."""
        undeclared = f", {self.undeclared} undeclared" if self.undeclared else ""
        return f"{self.passed} of {self.applicable}{undeclared}" if self.applicable else f"none{undeclared}"


def groups_of(report: Report) -> tuple[Group, ...]:
    """Return the groups in the report's order; a requirement that failed as it was known to has not passed."""
    verdicts: dict[str, Counter[Verdict]] = {}
    for one in report.requirements:
        verdicts.setdefault(one.chapter, Counter())[one.subject] += 1
    return tuple(_group(chapter, counts) for chapter, counts in verdicts.items())


def all_groups(report: Report) -> Group:
    """Return all requirements as one group."""
    return _group("all", Counter(one.subject for one in report.requirements))


def _group(chapter: str, counts: Counter[Verdict]) -> Group:
    undeclared = counts[Verdict.UNSUPPORTED]
    return Group(chapter, counts[Verdict.PASS], counts.total() - undeclared, undeclared)
