"""Explains a broken rung to the engineer who wrote the backend: what the checkers found, and where to look. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conformance.checkers.checker import Evidence
from conformance.checkers.explanation import ranks
from conformance.checkers.facts import wrong_facts
from conformance.checkers.registry import get_checker
from conformance.errors import present
from conformance.observation import Facts, Observation
from conformance.scenario import Scenario

#: What torch says when a group in Python lacks a method, and it has no backend in C++ to ask.
_NO_METHOD = "No backend type associated with device type"
#: How a rank that judges for itself begins what it says of an error that every rank raised.
_RAISED = "raised "


@dataclass(frozen=True, slots=True)
class Breakage:
    """Why a rung broke: a sentence that names the ranks, what to do, and the evidence.

    `refused`: every rank raised an error, and nothing else went wrong.
    """

    summary: str
    advice: str = ""
    evidence: str = ""
    refused: bool = False


def find_breakage(
    scenario: Scenario,
    observations: Mapping[int, Observation],
    expected: Mapping[int, Facts] | None,
    *,
    advice: str,
    method: Callable[[str], str] = lambda where: "",
) -> Breakage | None:
    """Return the most severe thing that went wrong on any rank; None if every rank observed what it must.

    `method` returns the method of the process group that torch calls in a cell or trial, if it is one in particular.
    """
    evidence = Evidence(scenario, observations, expected or None)
    if declined := [one for one in evidence.by_rank if one.unsupported]:
        return Breakage(f"{ranks(one.rank for one in declined)} declined: {declined[0].unsupported}", advice)
    for name in ("no_crash", "no_exception", "no_hang", "facts"):
        found = get_checker(name)(evidence)
        if found is None or not found.verdict.is_failure:
            continue
        errors = _errors(evidence)
        refused = len(errors) == len(observations)
        where, said = next(iter(errors.values()), ("", ""))
        if _NO_METHOD in said and (lacking := method(where)):
            who = "every rank" if refused and len(errors) > 1 else ranks(errors)
            summary = f"the process group of {who} has no method {lacking}, which this torch calls"
            return Breakage(summary, advice, refused=refused)
        return Breakage(found.summary, advice, found.explanation, refused)
    return None


def _errors(evidence: Evidence) -> dict[int, tuple[str, str]]:
    """Return where ranks raised, and what: the errors that ended them, else those that all wrong facts are."""
    if raised := evidence.ended("raised"):
        return {one.rank: (one.phase, str(present(one.raised))) for one in raised}
    if not evidence.all_returned:
        return {}
    observed = {one.rank: one.facts for one in evidence.by_rank}
    wrong = wrong_facts(evidence.expected or {}, observed)
    errors = {one.rank: (one.name, str(observed[one.rank].get(one.name))) for one in wrong}
    return errors if all(said.startswith(_RAISED) for _, said in errors.values()) else {}
