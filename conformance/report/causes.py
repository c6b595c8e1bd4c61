"""Causes: the failures of a report grouped by what is wrong, instead of by where it was seen.

A DDP with one bug fails in many scenarios of many requirements. A cause is what they have in common: the mistake that
the evidence was recognised as, else the checker that found it, the exception, or the kind of fact that is wrong.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from conformance.checkers.explanation import counted, shorten, some
from conformance.checkers.mistakes import MISTAKES
from conformance.report.blame import blamed, gravity
from conformance.report.words import MISTAKES_BY_CHECKER
from conformance.run.lacking import lacking
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.verdict import Finding, Verdict

_MOST_NAMES = 5
_WHERE = re.compile(r"( raised \w+) (?:in (?:phase .*?|\w+)|before its first phase): ")
_PLACE = re.compile(r" \(\S+:\d+, in \S+\)")
_STEP = re.compile(r"(step|local|micro|forward|backward|round)\d+/")


class Kind(Enum):
    """What is to be done about a cause, in the order in which a reader should look at them."""

    OURS = "The harness is at fault"
    BUG = "A mistake"
    LACKS_CHECK = "A check that it lacks"
    UNDECLARED = "It does not have this: leave it out of its capabilities"
    UNEXPECTED_PASS = "It passed, where a failure was known"


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong: `title`, a sentence; `remedy`, what to do, if that is known; and the `outcomes` that it explains.

    The first outcome is the best evidence: of the gravest, that with the fewest ranks, collectives and options.
    """

    kind: Kind
    title: str
    remedy: str
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome:
        """The outcome to look at first."""
        return self.outcomes[0]

    @property
    def sentence(self) -> str:
        """What is wrong, and before it what kind of cause it is, unless that is a mistake."""
        return self.title if self.kind is Kind.BUG else f"{self.kind.value}: {self.title}"

    @property
    def verdict(self) -> Verdict:
        """The gravest verdict."""
        return self.best.failed_result.verdict

    @property
    def requirements(self) -> tuple[str, ...]:
        """The requirements that are to blame in its outcomes, the one that most of them name first."""
        names = [blamed(outcome) for outcome in self.outcomes]
        return tuple(sorted(dict.fromkeys(names), key=lambda name: -names.count(name)))

    @property
    def extent(self) -> str:
        """Return e.g. `11 scenarios of ACCUM-02 and ACCUM-07`."""
        return f"{counted(len(self.outcomes), 'scenario')} of {some(self.requirements, _MOST_NAMES)}"


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    """What is wrong in an outcome. Outcomes of the same `kind` and `key` have one cause.

    `recognised`: a checker recognised the mistake. `secondary`: it is a consequence of others.
    """

    kind: Kind
    key: str
    title: str
    remedy: str = ""
    recognised: bool = False
    secondary: bool = False


def causes_of(report: Report) -> tuple[Cause, ...]:
    """Return why the report is not green, in the order in which a reader should look at it.

    The gravest cause is first; among equally grave ones a cause that follows from no other, then a recognised one, then
    the one that explains more failures.
    """
    return causes_in(report.failures, statements_of(report))


def causes_in(failures: Iterable[Outcome], statements: Mapping[str, str]) -> tuple[Cause, ...]:
    """Return the causes of these failures in the order of `causes_of`; `statements`: requirements' sentences by id."""
    groups: dict[tuple[Kind, str], list[tuple[_Diagnosis, Outcome]]] = {}
    for outcome in failures:
        diagnosis = _diagnose(outcome, statements)
        groups.setdefault((diagnosis.kind, diagnosis.key), []).append((diagnosis, outcome))
    found = [(_cause(group), group[0][0]) for group in _merged_by_title(groups.values())]

    def order(pair: tuple[Cause, _Diagnosis]) -> tuple[int, int, bool, bool, int, str]:
        cause, diagnosis = pair
        return (
            list(Kind).index(cause.kind), -gravity(cause.best), diagnosis.secondary, not diagnosis.recognised,
            -len(cause.outcomes), cause.best.id,
        )  # fmt: skip

    return tuple(cause for cause, _ in sorted(found, key=order))


def cause_of(outcome: Outcome, statements: Mapping[str, str]) -> Cause:
    """Return the cause of one failure; `statements` as in `causes_in`."""
    return _cause([(_diagnose(outcome, statements), outcome)])


def statements_of(report: Report) -> Mapping[str, str]:
    """Return the sentences of a report's requirements by their ids."""
    return {one.id: one.statement for one in report.requirements}


def _cause(group: list[tuple[_Diagnosis, Outcome]]) -> Cause:
    ordered = sorted(group, key=lambda pair: (-gravity(pair[1]), *_simplicity(pair[1]), pair[1].id))
    diagnosis = ordered[0][0]
    return Cause(diagnosis.kind, diagnosis.title, diagnosis.remedy, tuple(outcome for _, outcome in ordered))


def _merged_by_title(groups: Iterable[list[tuple[_Diagnosis, Outcome]]]) -> list[list[tuple[_Diagnosis, Outcome]]]:
    """Merge groups with the same title: a reader could not tell their causes apart."""
    merged: dict[tuple[Kind, str], list[tuple[_Diagnosis, Outcome]]] = {}
    for group in groups:
        cause = _cause(group)
        merged.setdefault((cause.kind, cause.title), []).extend(group)
    return list(merged.values())


def _simplicity(outcome: Outcome) -> tuple[int, int, int]:
    options = (outcome.replay or {}).get("options", {})
    return outcome.world_size, outcome.failed_result.num_collectives, len(options)


def _diagnose(outcome: Outcome, statements: Mapping[str, str]) -> _Diagnosis:
    result = outcome.failed_result
    if outcome.is_unexpected_pass:
        return _Diagnosis(
            Kind.UNEXPECTED_PASS,
            "",
            "An entry of the known failures is stale.",
            "Remove it from them, or narrow it down.",
        )
    findings = result.deciding_findings
    relevant = [one for one in findings if not one.requirements or blamed(outcome) in one.requirements] or findings
    first = next(iter(relevant), Finding("runner", result.verdict, "no checker says why"))
    if result.verdict is Verdict.HARNESS_ERROR:
        return _Diagnosis(Kind.OURS, f"{first.checker} {_alike(first.summary)}", shorten(first.summary))
    if (found := lacking(result, outcome.replay)) is not None:
        names = ", ".join(found.names)
        return _Diagnosis(
            Kind.UNDECLARED, names, f"It counts as having {names} and {found.why}.", found.declaration, recognised=True
        )
    if first.checker in MISTAKES_BY_CHECKER:
        title, remedy = MISTAKES_BY_CHECKER[first.checker]
        sentence = f"{title.rstrip('.')}: {shorten(first.summary)}" if first.checker in _TELL_WHAT else title
        return _Diagnosis(Kind.BUG, first.checker, sentence, remedy, recognised=True)
    if mistake := next((one.mistake for one in relevant if one.mistake in MISTAKES), ""):
        kind = Kind.LACKS_CHECK if mistake == "lacks-check" else Kind.BUG
        known = MISTAKES[mistake]
        title = _about(known.title, next(one.summary for one in relevant if one.mistake == mistake))
        return _Diagnosis(kind, mistake, title, known.remedy, recognised=True, secondary=known.secondary)
    title = shorten(first.summary)
    # Of ranks that hang where nothing was recorded, evidence names the phase alone, another one in each scenario.
    is_bare = first.checker == "no_hang" and not (outcome.replay or {}).get("recorded", True)
    if first.checker in _COMPARE or is_bare:
        title = in_short(statements.get(blamed(outcome), "")) or title
    return _Diagnosis(Kind.BUG, f"{first.checker} {_alike(first.summary)}", title)


#: Checkers of many things, whose mistake alone does not tell which of them is wrong.
_TELL_WHAT = ("does_not_interfere", "leaves_no_trace", "leaves_no_process")
#: Checkers whose evidence is a fact, which means something only beside the requirement's sentence.
_COMPARE = ("facts", "agrees_with_native")
_WIDTH = 200


def in_short(statement: str) -> str:
    """Return what a requirement demands, without what it has in brackets, up to its first colon or semicolon."""
    whole = re.sub(r" \([^()]*\)", "", statement)
    first = re.split("[:;] ", whole)[0]
    if first == whole:
        return shorten(whole, _WIDTH)
    demand = re.match(r".*\b(?:MUST|SHOULD|MAY)\b.*?\. (?=[A-Z])", first)  # what the colon introduces may follow it
    return shorten(demand[0].rstrip() if demand else f"{first}.", _WIDTH)


#: What a value is, by a part of the name of its fact; `seen` are buffers as forward found them.
_VALUES = {
    "grad": "gradient", "buffer": "buffer", "seen": "buffer", "parameter": "parameter", "output": "output",
    "loss": "loss", "input_grad": "gradient of an input",
}  # fmt: skip


def _about(title: str, summary: str) -> str:
    """Return a mistake's title with `value` said more exactly, as the fact's name in the evidence allows."""
    names = " ".join([summary.split(" on rank")[0], *re.findall(r" at '([^']*)'", summary)])
    found = next((_VALUES[part] for part in re.split("[/ ]", names) if part in _VALUES), "value")
    article = "An" if found[0] in "aeiou" else "A"
    return re.sub("^A value ", f"{article} {found} ", title)


def _alike(summary: str) -> str:
    """Return what is the same in summaries of one cause: the kind of fact, or the error without numbers and names.

    Nor does it hold where an error was raised: a backend that lacks something raises the same one everywhere.
    """
    words = _STEP.sub("", _PLACE.sub("", _WHERE.sub(r"\1: ", summary))).split(" on rank")[0]
    name, slash, _ = words.partition("/")
    if slash and " " not in name:
        return name
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "#", words)[:80]
