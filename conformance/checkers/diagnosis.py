"""Explains a wrong value: which known mistake of a DDP gives exactly these numbers.

A diagnosis is a hint for the reader and never changes a verdict. It is given only where a rule holds for every element
and no other rule that says as much holds as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.checkers.rules import OF_ANOTHER_KIND, OF_THE_SAME_KIND, Rule
from conformance.checkers.wrong_value import WrongValue, as_tensor, is_zero, same
from conformance.observation import Facts, Raised
from conformance.truth.expected import AnyOf, Raises, Satisfies, exact_value, is_open, mismatch

#: What a demand for an exception or a warning has in its name.
_TELLS = re.compile("Error|[Ee]xception|[Ww]arning")
_TWICE = 2
_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}


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
    reduced: Mapping[int, int] | None = None,
) -> Diagnosis:
    """Return what fact `name` of `rank` looks like instead of what was expected.

    `expected` and `observed` hold all ranks' facts; the fact must have been observed on `rank`. `reduced` tells how
    many elements were reduced in the backward of each step that has a reduction; None where nothing was recorded.
    """
    came, demand = observed[rank][name], expected[rank][name]
    if not isinstance(came, Raised) and all(isinstance(one, Raises) for one in _choices(demand)):
        return Diagnosis("lacks-check", "nothing was raised")
    if isinstance(demand, Satisfies) and came in (None, []) and _TELLS.search(demand.name):
        return Diagnosis("says-nothing", f"nothing was said, expected {demand.name}")
    if isinstance(demand, AnyOf):
        expected = {
            one: {**facts, name: _narrowed(facts.get(name), one, name, observed)} for one, facts in expected.items()
        }
        demand = expected[rank][name]
    if is_open(demand):
        return Diagnosis()
    wanted = exact_value(demand)
    if (parts := _parts(wanted, came)) is not None:
        return _inside(parts, name, rank, expected, observed, reduced)
    if wanted == [] and isinstance(came, list) and came and all(isinstance(one, str) for one in came):
        return Diagnosis("", came[0])  # what a program has found wrong, in its own words
    if isinstance(wanted, str) and isinstance(came, str) and {*wanted.split(), *came.split()} <= _DTYPES:
        return Diagnosis("wrong-dtype", f"{came}, where {wanted} must be")
    if _is_count(wanted) and _is_count(came):
        return Diagnosis("", _times(wanted, came))
    if isinstance(came, Raised):
        return Diagnosis(
            "raises", "an exception where there must be none" if wanted is None else "an exception instead of a value"
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
        return Diagnosis("wrong-layout", f"the right values, {_layout(came)} where they must be {_layout(wanted)}")
    return _most_telling(case, OF_THE_SAME_KIND if case.same_kind else OF_ANOTHER_KIND)


def _choices(demand: Any) -> tuple[Any, ...]:
    return demand.choices if isinstance(demand, AnyOf) else (demand,)


def _narrowed(demand: Any, rank: int, name: str, observed: Mapping[int, Facts]) -> Any:
    """Return the choice that is of the kind of what came; the demand as it is if there is none or several."""
    alike = demand.alike(observed.get(rank, {}).get(name)) if isinstance(demand, AnyOf) else None
    return demand if alike is None else alike


def _parts(wanted: Any, came: Any) -> dict[str, Any] | None:
    """Return what a mapping, or a sequence as long as what came, must hold, by name; None if it is none."""
    if isinstance(wanted, Mapping) and isinstance(came, Mapping):
        return {str(key): value for key, value in wanted.items()}
    if isinstance(wanted, list | tuple) and isinstance(came, list | tuple) and len(wanted) == len(came):
        return {f"position {number}": value for number, value in enumerate(wanted)}
    return None


def _inside(
    parts: Mapping[str, Any],
    name: str,
    rank: int,
    expected: Mapping[int, Facts],
    observed: Mapping[int, Facts],
    reduced: Mapping[int, int] | None,
) -> Diagnosis:
    """Return what the first part of fact `name` looks like that is recognised."""
    wanted, came = {}, {}
    for one, facts in observed.items():
        value = facts.get(name)
        of_rank = _parts(exact_value(expected.get(one, {}).get(name)), value)
        wanted[one] = of_rank or {}
        came[one] = (_parts(value, value) or {}) if of_rank else {}
    for part in parts:
        if part in came[rank] and mismatch(parts[part], came[rank][part]):
            found = diagnose(part, rank, wanted, came, reduced)
            if found.clause:
                return Diagnosis(found.mistake, f"at {part!r} {found.clause}")
    return Diagnosis()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _times(wanted: int, came: int) -> str:
    """Return how many times too many there are; empty where that is no whole number, or as good as any number."""
    times, rest = divmod(came, wanted) if wanted > 0 else (0, 0)
    tells = rest == 0 and times > 1 and (wanted > 1 or times == _TWICE)
    return f"{came} in place of {wanted}: {times} times as many" if tells else ""


def _layout(value: Any) -> str:
    return str(value.layout).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def _most_telling(case: WrongValue, rules: tuple[Rule, ...]) -> Diagnosis:
    holding = [(rule, clause) for rule in rules if (clause := rule.clause(case))]
    least = min((rule.generality for rule, _ in holding), default=0)
    best = [(rule, clause) for rule, clause in holding if rule.generality == least]
    return Diagnosis(best[0][0].name, best[0][1]) if len(best) == 1 else Diagnosis()
