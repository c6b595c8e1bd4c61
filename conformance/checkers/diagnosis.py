"""Explains a wrong value: which known mistake of a DDP gives exactly these numbers.

A diagnosis is a hint for the reader and never changes a verdict. It requires that one rule holds for every element, and
no other rule of the same generality.
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

#: Words in the name of a demand for an exception or a warning.
_MESSAGES = re.compile("Error|[Ee]xception|[Ww]arning")
_TWICE = 2
_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a wrong value is instead: a clause, and one of `mistakes.MISTAKES`; both may be empty."""

    mistake: str = ""
    clause: str = ""


def diagnose(
    name: str, rank: int, expected: Mapping[int, Facts], observed: Mapping[int, Facts],
    reduced: Mapping[int, int] | None = None,
) -> Diagnosis:  # fmt: skip
    """Return what fact `name` of `rank` is instead of the expected value; `rank` must have observed it.

    `expected` and `observed` hold all ranks' facts. `reduced` maps each step that has a reduction to the elements that
    its backward reduced; None where nothing was recorded.
    """
    got, demand = observed[rank][name], expected[rank][name]
    if not isinstance(got, Raised) and all(isinstance(one, Raises) for one in _choices(demand)):
        return Diagnosis("lacks-check", "nothing was raised")
    if isinstance(demand, Satisfies) and got in (None, []) and _MESSAGES.search(demand.name):
        return Diagnosis("says-nothing", f"nothing was said, expected {demand.name}")
    if isinstance(demand, AnyOf):
        expected = {
            one: {**facts, name: _narrowed(facts.get(name), one, name, observed)} for one, facts in expected.items()
        }
        demand = expected[rank][name]
    if is_open(demand):
        return Diagnosis()
    wanted = exact_value(demand)
    if (parts := _parts(wanted, got)) is not None:
        return _inside(parts, name, rank, expected, observed, reduced)
    if wanted == [] and isinstance(got, list) and got and all(isinstance(one, str) for one in got):
        return Diagnosis("", got[0])  # a judgement of the program
    if isinstance(wanted, str) and isinstance(got, str) and {*wanted.split(), *got.split()} <= _DTYPES:
        return Diagnosis("wrong-dtype", f"{got}, where {wanted} must be")
    if _is_count(wanted) and _is_count(got):
        return Diagnosis("", _times(wanted, got))
    if isinstance(got, Raised):
        return Diagnosis(
            "raises", "an exception where there must be none" if wanted is None else "an exception instead of a value"
        )
    if wanted is None and isinstance(got, Tensor):
        if is_zero(got):
            return Diagnosis("filled-in", "zeros where None was expected: an absent gradient was filled in")
        return Diagnosis("not-none", "a value where None was expected")
    if isinstance(wanted, Tensor) and got is None:
        return Diagnosis("none", "None where a value was expected: nothing ever arrived")
    wanted_tensor, came_tensor = as_tensor(wanted), as_tensor(got)
    if wanted_tensor is None or came_tensor is None:
        return Diagnosis()
    case = WrongValue(name, rank, wanted_tensor, came_tensor, expected, observed, reduced)
    if case.same_kind and same(case.wanted, case.got):
        return Diagnosis("wrong-layout", f"the right values, {_layout(got)} where they must be {_layout(wanted)}")
    return _most_telling(case, OF_THE_SAME_KIND if case.same_kind else OF_ANOTHER_KIND)


def _choices(demand: Any) -> tuple[Any, ...]:
    return demand.choices if isinstance(demand, AnyOf) else (demand,)


def _narrowed(demand: Any, rank: int, name: str, observed: Mapping[int, Facts]) -> Any:
    """Return the only choice of the kind of the observed fact, if there is one, else the demand itself."""
    alike = demand.alike(observed.get(rank, {}).get(name)) if isinstance(demand, AnyOf) else None
    return demand if alike is None else alike


def _parts(wanted: Any, got: Any) -> dict[str, Any] | None:
    """Return the named parts of an expected mapping, or of an expected sequence of the right length; else None."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        return {str(key): value for key, value in wanted.items()}
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple) and len(wanted) == len(got):
        return {f"position {number}": value for number, value in enumerate(wanted)}
    return None


def _inside(
    parts: Mapping[str, Any], name: str, rank: int, expected: Mapping[int, Facts], observed: Mapping[int, Facts],
    reduced: Mapping[int, int] | None,
) -> Diagnosis:  # fmt: skip
    """Return the diagnosis of the first part of fact `name` that has one."""
    wanted, got = {}, {}
    for one, facts in observed.items():
        value = facts.get(name)
        of_rank = _parts(exact_value(expected.get(one, {}).get(name)), value)
        wanted[one] = of_rank or {}
        got[one] = (_parts(value, value) or {}) if of_rank else {}
    for part in parts:
        if part in got[rank] and mismatch(parts[part], got[rank][part]):
            found = diagnose(part, rank, wanted, got, reduced)
            if found.clause:
                return Diagnosis(found.mistake, f"at {part!r} {found.clause}")
    return Diagnosis()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _times(wanted: int, got: int) -> str:
    """Return by which whole factor a count is too large; empty where there is none, or any count would have one."""
    times, rest = divmod(got, wanted) if wanted > 0 else (0, 0)
    is_telling = rest == 0 and times > 1 and (wanted > 1 or times == _TWICE)
    return f"{got} in place of {wanted}: {times} times as many" if is_telling else ""


def _layout(value: Any) -> str:
    return str(value.layout).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def _most_telling(case: WrongValue, rules: tuple[Rule, ...]) -> Diagnosis:
    holding = [(rule, clause) for rule in rules if (clause := rule.clause(case))]
    least = min((rule.generality for rule, _ in holding), default=0)
    best = [(rule, clause) for rule, clause in holding if rule.generality == least]
    return Diagnosis(best[0][0].name, best[0][1]) if len(best) == 1 else Diagnosis()
