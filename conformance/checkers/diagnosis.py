"""Explains a wrong value: which known mistake of a DDP gives exactly these numbers.

A diagnosis is a hint for the reader and never changes a verdict. It is given only where a rule holds for every element
and no other rule that says as much holds as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from conformance.checkers.rules import OF_ANOTHER_KIND, OF_THE_SAME_KIND, Rule
from conformance.checkers.wrong_value import WrongValue, as_tensor, is_zero, same
from conformance.observation import Facts, Raised
from conformance.truth.expected import Raises, exact_value, is_open


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a wrong value is instead: a clause, and one of `mistakes.MISTAKES`; both are empty where none tells."""

    mistake: str = ""
    clause: str = ""


def diagnose(
    name: str,
    rank: int,
    expected: Mapping[int, Facts],
    observed: Mapping[int, Facts],
    reduced: frozenset[int] | None = None,
) -> Diagnosis:
    """Return what fact `name` of `rank` looks like instead of what was expected.

    `expected` and `observed` hold all ranks' facts; the fact must have been observed on `rank`. `reduced` are the steps
    in whose backward a reduction was recorded; None where nothing was recorded.
    """
    came = observed[rank][name]
    if isinstance(expected[rank][name], Raises) and not isinstance(came, Raised):
        return Diagnosis("lacks-check", "nothing was raised")
    if is_open(expected[rank][name]):
        return Diagnosis()
    wanted = exact_value(expected[rank][name])
    if isinstance(came, Raised):
        return Diagnosis(
            "raises",
            "an exception where there must be none" if wanted is None else "an exception instead of a value",
        )
    if wanted is None and isinstance(came, Tensor):
        if is_zero(came):
            return Diagnosis("filled-in", "zeros where None was expected: an absent gradient was filled in")
        return Diagnosis("not-none", "a value where None was expected")
    if isinstance(wanted, Tensor) and came is None:
        return Diagnosis("none", "None where a value was expected: nothing ever arrived")
    wanted_tensor, came_tensor = as_tensor(wanted), as_tensor(came)
    if wanted_tensor is None or came_tensor is None:
        return Diagnosis()
    case = WrongValue(name, rank, wanted_tensor, came_tensor, expected, observed, reduced)
    if case.same_kind and same(case.wanted, case.came):
        return Diagnosis()  # it is the layout that differs, and nothing to be said about values
    return _most_telling(case, OF_THE_SAME_KIND if case.same_kind else OF_ANOTHER_KIND)


def _most_telling(case: WrongValue, rules: tuple[Rule, ...]) -> Diagnosis:
    """Return what the one rule says that holds, of several the one that says more; nothing if two say as much."""
    holding = [(rule, clause) for rule in rules if (clause := rule.clause(case))]
    least = min((rule.generality for rule, _ in holding), default=0)
    best = [(rule, clause) for rule, clause in holding if rule.generality == least]
    return Diagnosis(best[0][0].name, best[0][1]) if len(best) == 1 else Diagnosis()
