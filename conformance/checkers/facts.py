"""Facts: what every rank must have observed, and what it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from conformance.checkers.checker import REPORTED, Evidence, checker, failed, harness_error, passed, unknown
from conformance.checkers.diagnosis import diagnose
from conformance.explanation import let_then, ranks
from conformance.observation import Facts
from conformance.oracles.difference import Difference
from conformance.oracles.expected import describe, mismatch
from conformance.verdict import Finding

_MAX_NAMES = 6


@dataclass(frozen=True, slots=True)
class WrongFact:
    """One expected fact that one rank observed otherwise, or not at all."""

    name: str
    rank: int
    difference: Difference
    diagnosis: str = ""


def wrong_facts(expected: Mapping[int, Facts], observed: Mapping[int, Facts]) -> list[WrongFact]:
    """Return every expected fact that is not as expected, in the order of the expectations, then by rank."""
    order: dict[str, None] = {}
    for rank in sorted(expected):
        order.update(dict.fromkeys(expected[rank]))
    wrong = []
    for name in order:
        for rank in sorted(expected):
            if name not in expected[rank]:
                continue
            if name not in observed.get(rank, {}):
                wrong.append(WrongFact(name, rank, Difference("was not observed")))
            elif found := mismatch(expected[rank][name], observed[rank][name]):
                wrong.append(WrongFact(name, rank, found, diagnose(name, rank, expected, observed)))
    return wrong


def explain_facts(wrong: list[WrongFact], expected: Mapping[int, Facts]) -> str:
    """Return the evidence about the first wrong fact on every rank that has it wrong, and the names of the others."""
    first = wrong[0]
    here = [fact for fact in wrong if fact.name == first.name]
    labels = {fact.rank: chr(ord("A") + number) for number, fact in enumerate(here)}
    lets = [f"E = {first.name} as expected: {_expectation(expected[first.rank][first.name])}"]
    lets += [f"{labels[fact.rank]} = {first.name} on rank {fact.rank}" for fact in here]
    thens = [f"{labels[fact.rank]} {fact.difference}." for fact in here]
    notes = [f"{''.join(group)} is {text}." for text, group in _by_diagnosis(here, labels)]
    if others := _others(wrong, first.name):
        notes.append(others)
    return let_then(lets, thens, notes)


@checker("facts")
def facts(evidence: Evidence) -> Finding | None:
    """Every fact required of a rank was observed there, as required.

    Precondition: every rank reported; a rank that died or hung has no facts to judge.
    """
    expected = evidence.expected
    if expected is None:
        return None
    if len(evidence.ended(*REPORTED)) < len(evidence.observations):
        return unknown("facts", "not every rank came to report what it observed")
    if set(expected) != set(evidence.observations):
        return harness_error(
            "facts", f"facts are expected of {ranks(expected)}, but {ranks(evidence.observations)} ran"
        )
    if not any(expected.values()):
        return harness_error("facts", "the program's expectation requires no fact of any rank: nothing can be shown")
    observed = {rank: observation.facts for rank, observation in evidence.observations.items()}
    wrong = wrong_facts(expected, observed)
    num_expected = sum(len(facts) for facts in expected.values())
    if not wrong:
        return passed("facts", f"{num_expected} fact(s) as expected")
    return failed("facts", summarise(wrong), explain_facts(wrong, expected))


def summarise(wrong: list[WrongFact]) -> str:
    """Return one sentence about the first wrong fact."""
    first = wrong[0]
    same_name = [fact for fact in wrong if fact.name == first.name]
    clause = f"is {first.diagnosis}" if first.diagnosis else str(first.difference)
    return f"{first.name} on {ranks(fact.rank for fact in same_name)} {clause}"


def _expectation(value: object) -> str:
    return "None" if value is None else describe(value)


def _by_diagnosis(wrong: Iterable[WrongFact], labels: Mapping[int, str]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for fact in wrong:
        if fact.diagnosis:
            groups.setdefault(fact.diagnosis, []).append(labels[fact.rank])
    return [(text, [" and ".join(names)]) for text, names in groups.items()]


def _others(wrong: list[WrongFact], name: str) -> str:
    """Return a sentence that names the other wrong facts, so that a pattern can be seen."""
    names = list(dict.fromkeys(fact.name for fact in wrong if fact.name != name))
    if not names:
        return ""
    shown = ", ".join(names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"Also wrong: {shown}{more}."
