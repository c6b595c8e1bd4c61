"""The answer by groups of requirements, the chapters: how many of those owed passed, undeclared ones apart."""

from collections import Counter
from dataclasses import dataclass

from conformance.run.report import Report
from conformance.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Group:
    """How many requirements of a chapter passed, of those owed; `undeclared` ones need what is not declared."""

    chapter: str
    passed: int
    owed: int
    undeclared: int

    def __str__(self) -> str:
        """Return e.g. `12 of 15, 2 undeclared`."""
        return f"{self.passed} of {self.owed}" + (f", {self.undeclared} undeclared" if self.undeclared else "")


def groups_of(report: Report) -> tuple[Group, ...]:
    """Return the groups in the report's order; a requirement that failed as it was known to has not passed."""
    verdicts: dict[str, Counter[Verdict]] = {}
    for one in report.owed:
        verdicts.setdefault(one.chapter, Counter())[one.subject] += 1
    return tuple(_group(chapter, counts) for chapter, counts in verdicts.items())


def all_groups(report: Report) -> Group:
    """Return all requirements as one group."""
    return _group("all", Counter(one.subject for one in report.owed))


def _group(chapter: str, counts: Counter[Verdict]) -> Group:
    return Group(chapter, counts[Verdict.PASS], counts.total(), counts[Verdict.UNSUPPORTED])
