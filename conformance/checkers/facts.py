"""Checks facts: compares the facts of every rank with the expected ones."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from conformance.checkers.checker import REPORTED, Evidence, checker, failed, harness_error, passed, unknown
from conformance.checkers.diagnosis import Diagnosis, diagnose
from conformance.checkers.explanation import let_then, ranks, shorten, some
from conformance.checkers.protocol import is_gradient
from conformance.observation import Facts, Unmeasured
from conformance.truth.difference import Difference
from conformance.truth.expected import Satisfies, describe, mismatch
from conformance.verdict import Finding

_MAX_NAMES = 6
_OF_CLAUSES = 100  # characters of a clause that are compared: a message of torch may be cut after them
_OF_SENTENCES = 300
_LABELS = "ABCD"  # one per rank in the explanation; the expected value is E


@dataclass(frozen=True, slots=True)
class WrongFact:
    """An expected fact for which one rank observed another value, or none."""

    name: str
    rank: int
    difference: Difference
    found: Diagnosis = field(default_factory=Diagnosis)

    @property
    def diagnosis(self) -> str:
        """What the value is instead, as a clause; may be empty."""
        return self.found.clause


def wrong_facts(
    expected: Mapping[int, Facts], observed: Mapping[int, Facts], reduced: Mapping[int, int] | None = None
) -> list[WrongFact]:
    """Return every wrong fact, in the order of the expectations, then by rank; `reduced` is as for `diagnose`.

    A fact that a rank could not measure is not wrong: see `_unmeasured`.
    """
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
            elif isinstance(observed[rank][name], Unmeasured):
                continue
            elif found := mismatch(expected[rank][name], observed[rank][name]):
                wrong.append(WrongFact(name, rank, found, diagnose(name, rank, expected, observed, reduced)))
    return wrong


def is_bound(demand: object) -> bool:
    """Return whether a fact must have a property, and no exact value."""
    return isinstance(demand, Satisfies)


def explain_facts(wrong: list[WrongFact], expected: Mapping[int, Facts]) -> str:
    """Return the evidence about the first wrong fact on the ranks that have it wrong, and the names of the others."""
    name = wrong[0].name
    everywhere = [fact for fact in wrong if fact.name == name]
    labelled = list(zip(_LABELS, everywhere, strict=False))
    expectations = dict.fromkeys(describe(expected[fact.rank][name]) for _, fact in labelled)
    lets = [f"E = {name} as expected: {' / '.join(expectations)}"]
    lets += [f"{label} = {name} on rank {fact.rank}" for label, fact in labelled]
    thens = [f"{label} {fact.difference}." for label, fact in labelled]
    notes = []
    for diagnosis in dict.fromkeys(fact.diagnosis for _, fact in labelled if fact.diagnosis):
        labels = [label for label, fact in labelled if fact.diagnosis == diagnosis]
        notes.append(f"{', '.join(labels)}: {diagnosis}.")
    if len(everywhere) > len(labelled):
        notes.append(f"Wrong on {ranks(fact.rank for fact in everywhere[len(labelled) :])} as well.")
    return let_then(lets, thens, [*notes, *_others(wrong, name)])


@checker("facts")
def facts(evidence: Evidence) -> Finding | None:
    """Every fact required of a rank was observed there, as required.

    Precondition: every rank reported; a rank that died or hung has no facts to judge. If all other facts are right,
    every rank must also have measured the expected facts.
    """
    expected = evidence.expected
    if expected is None:
        return None
    if len(evidence.ended(*REPORTED)) < len(evidence.observations):
        return unknown("facts", "not every rank reported its facts")
    if set(expected) != set(evidence.observations):
        return harness_error(
            "facts", f"facts are expected of {ranks(expected)}, but {ranks(evidence.observations)} ran"
        )
    if not any(expected.values()):
        return harness_error("facts", "the program's expectation requires no fact of any rank")
    observed = {rank: observation.facts for rank, observation in evidence.observations.items()}
    wrong = wrong_facts(expected, observed, reduced_steps(evidence))
    raised = {one.rank for one in evidence.ended("raised")}
    if raised and all(one.rank in raised and one.name not in observed[one.rank] for one in wrong):
        return unknown("facts", f"{ranks(raised)} raised before {len(wrong)} of the facts could be observed")
    num_expected = sum(len(facts) for facts in expected.values())
    if not wrong and (unmeasured := _unmeasured(expected, observed)):
        return unknown("facts", unmeasured)
    if not wrong:
        return passed("facts", f"{num_expected} fact(s) as expected")
    wrong = telling_first(wrong)
    broken = evidence.spoken_for(fact.name for fact in wrong)
    found = failed("facts", summarise(wrong), explain_facts(wrong, expected), broken)
    ways = ways_of(wrong) if evidence.without_ddp else {}
    return replace(found, mistake=mistake_of(wrong), likeness=" ".join(ways), wrong=tuple(ways.values()))


def telling_first(wrong: list[WrongFact]) -> list[WrongFact]:
    """Return the wrong facts beginning with the first one that has a known mistake: the evidence of `mistake_of`."""
    name = next((fact.name for fact in wrong if fact.found.mistake), "")
    return sorted(wrong, key=lambda fact: fact.name != name)


def mistake_of(wrong: list[WrongFact]) -> str:
    """Return the first known mistake of the wrong facts; empty if there is none."""
    return next((fact.found.mistake for fact in wrong if fact.found.mistake), "")


def ways_of(wrong: Iterable[WrongFact]) -> dict[str, str]:
    """Return a sentence about each wrong fact, by six digits that depend on no value, no address, and no rank.

    Which ranks see a mistake may be chance: on one of them an operation was done in time.
    """
    by_name: dict[str, list[WrongFact]] = {}
    for fact in wrong:
        by_name.setdefault(fact.name, []).append(fact)
    ways = {}
    for name, facts in by_name.items():
        clauses = sorted({f"{name}: {_in_kind(fact.diagnosis or str(fact.difference))}" for fact in facts})
        digits = hashlib.sha256("\n".join(clauses).encode("utf-8", "replace")).hexdigest()[:6]
        ways[digits] = shorten(summarise(facts), _OF_SENTENCES)
    return ways


def _in_kind(clause: str) -> str:
    """Return a clause without numbers, values, torch's prefix of an error, and its place in a backend's own code."""
    number = r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?|\bnan\b"
    # A backend in Python around gloo shows a line of its own, gloo shows none, and both fail alike.
    clause = re.sub(r" \([^()]+:\d+, in [^()]+\)", "", clause)
    return re.sub(rf"expected [^;]*|\[rank\d+\]:\[[^\]]*\]|{number}", "#", clause)[:_OF_CLAUSES]


def reduced_steps(evidence: Evidence) -> Mapping[int, int] | None:
    """Return the elements that each step's backward reduced on the rank with the fewest; None if nothing was recorded.

    Steps without a reduction on some rank are left out. Integers are agreements, and no gradients.
    """
    if not evidence.scenario.recorded:
        return None
    of_ranks: list[Counter[int]] = []
    for observation in evidence.by_rank:
        reduced = [one for one in observation.history if "reduce" in one.op and is_gradient(one)]
        of_ranks.append(Counter())
        for one in reduced:
            of_ranks[-1][one.step] += one.numel
    steps = set.intersection(*(set(each) for each in of_ranks))
    return {step: min(each[step] for each in of_ranks) for step in steps}


def _unmeasured(expected: Mapping[int, Facts], observed: Mapping[int, Facts]) -> str:
    """Return which expected facts a rank could not measure, and why not the first; empty if there are none."""
    found = {
        name: str(value.why)
        for rank, facts in expected.items()
        for name in facts
        if isinstance(value := observed[rank].get(name), Unmeasured)
    }
    if not found:
        return ""
    name, why = next(iter(found.items()))
    more = f" and {len(found) - 1} more fact(s)" if len(found) > 1 else ""
    return f"{name}{more} could not be measured: {why}"


def summarise(wrong: list[WrongFact]) -> str:
    """Return one sentence about the first wrong fact."""
    first = wrong[0]
    where = f"{first.name} on {ranks(fact.rank for fact in wrong if fact.name == first.name)}"
    return f"{where}: {first.diagnosis}" if first.diagnosis else f"{where} {first.difference}"


def _others(wrong: list[WrongFact], name: str) -> list[str]:
    names = list(dict.fromkeys(fact.name for fact in wrong if fact.name != name))
    if not names:
        return []
    return [f"Also wrong: {some(names, _MAX_NAMES)}."]
