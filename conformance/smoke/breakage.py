"""Explains a broken rung to the engineer who wrote the backend: what came, on which rank, where to look. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from conformance.checkers.explanation import ranks, shorten
from conformance.checkers.facts import WrongFact, wrong_facts
from conformance.checkers.fate import OUR_FRAMES, missing_from
from conformance.errors import present
from conformance.observation import Facts, Observation
from conformance.truth.difference import kind, show
from conformance.truth.expected import Right

#: What torch says when a group in Python lacks a method, and it has no backend in C++ to ask.
_NO_METHOD = "No backend type associated with device type"
#: How a rank that judges for itself begins what it says of an error that every rank raised.
_RAISED = "raised "
_NUM_FRAMES = 6
_TRACEBACK_LINES = 6
_STDERR_LINES = 6
_NUM_VALUES = 12


@dataclass(frozen=True, slots=True)
class Breakage:
    """Why a rung broke: a sentence that names the ranks, what was expected, what came, what to do, and evidence.

    `refused` tells that every rank raised an error, and nothing else went wrong.
    """

    summary: str
    expected: str = ""
    came: str = ""
    advice: str = ""
    evidence: str = ""
    refused: bool = False


def find_breakage(
    observations: Mapping[int, Observation],
    expected: Mapping[int, Facts] | None,
    *,
    deadline_s: float,
    advice: str,
    method: Callable[[str], str] = lambda where: "",
) -> Breakage | None:
    """Return the most severe thing that went wrong on any rank; None if every rank observed what it must.

    `method` returns the method of the process group that torch calls in a cell or trial, if it is one in particular.
    """
    seen = [observations[rank] for rank in sorted(observations)]
    if dead := [one for one in seen if one.fate.kind in ("killed", "exited")]:
        return _died(dead, advice)
    if raised := [one for one in seen if one.raised is not None]:
        return _raised(raised, len(seen), advice, method)
    if late := [one for one in seen if one.fate.kind in ("hung", "abandoned")]:
        return _hung(late, observations, deadline_s, advice)
    if declined := [one for one in seen if one.unsupported]:
        return Breakage(f"{ranks(one.rank for one in declined)} declined: {declined[0].unsupported}", advice=advice)
    wrong = wrong_facts(expected or {}, {one.rank: one.facts for one in seen})
    return _wrong(wrong, expected or {}, observations, advice, method) if wrong else None


def _died(dead: list[Observation], advice: str) -> Breakage:
    first = dead[0]
    return Breakage(
        f"{ranks(one.rank for one in dead)} died in {_where(first)}: {first.fate}",
        expected="every rank comes back",
        came="; ".join(f"rank {one.rank} {one.fate}" for one in dead),
        advice=advice,
        evidence="\n".join(filter(None, (_stacks(dead), _stderr(first)))),
    )


def _lacks(method: str, who: str, error: str, advice: str, *, refused: bool) -> Breakage:
    return Breakage(
        f"the process group of {who} has no method {method}, which this torch calls",
        expected=f"the class that `create` returns defines {method}",
        came=f"torch looked for a C++ backend instead: {shorten(error)}",
        advice=advice,
        refused=refused,
    )


def _raised(raised: list[Observation], num_ranks: int, advice: str, method: Callable[[str], str]) -> Breakage:
    first, error = raised[0], present(raised[0].raised)
    who = "every rank" if len(raised) == num_ranks > 1 else ranks(one.rank for one in raised)
    refused = len(raised) == num_ranks
    if _NO_METHOD in error.message and (lacking := method(first.phase)):
        return _lacks(lacking, who, str(error), advice, refused=refused)
    explains_itself = "ConformanceError" in error.bases
    traceback = [] if explains_itself else [line for line in error.traceback.splitlines() if line.strip()]
    return Breakage(
        f"{who} raised in {_where(first)}: {shorten(str(error))}",
        expected="no error",
        came="; ".join(f"rank {one.rank}: {shorten(str(one.raised))}" for one in raised),
        advice=advice,
        evidence="\n".join(
            [f"End of rank {first.rank}'s traceback:", *traceback[-_TRACEBACK_LINES:]] if traceback else []
        ),
        refused=refused,
    )


def _hung(late: list[Observation], observations: Mapping[int, Observation], deadline_s: float, advice: str) -> Breakage:
    back = [rank for rank, one in observations.items() if one.fate.kind == "returned"]
    where = f"back from {_where(late[0])} within {deadline_s:g} s"
    if back or len(late) == 1:
        summary = f"{ranks(one.rank for one in late)} did not come {where}"
    else:
        summary = f"no rank came {where}"
    if back:
        summary += f", {ranks(back)} did"
    missing = missing_from(observations)
    if missing is not None:
        collective, waiting, absent = missing
        summary += f"; {collective.describe()} was issued by {ranks(waiting)} and never by {ranks(absent)}"
    odd = _odd_one_out(late)
    if odd is not None:
        summary += f"; rank {odd} is not where the others are (see its stack)"
    guilty = missing[2] if missing is not None else [] if odd is None else [odd]
    return Breakage(
        summary,
        expected=f"every rank comes back within {deadline_s:g} s",
        came="; ".join(f"rank {one.rank} is in {_where(one)}" for one in late),
        advice=advice,
        evidence="\n".join(filter(None, (_stacks(late), _other_threads(late, guilty)))),
    )


def _wrong(
    wrong: list[WrongFact],
    expected: Mapping[int, Facts],
    observations: Mapping[int, Observation],
    advice: str,
    method: Callable[[str], str],
) -> Breakage:
    name, first = wrong[0].name, wrong[0].rank
    culprits = [fact.rank for fact in wrong if fact.name == name]
    right = [rank for rank in observations if name in expected[rank] and rank not in culprits]
    place = f"wrong on {ranks(culprits)}" + (f", right on {ranks(right)}" if right else "")
    if not isinstance(expected[first][name], Right):
        value = observations[first].facts.get(name)
        came = "nothing" if value is None else f"{_values(value)} on rank {first}"
        return Breakage(f"{name}: {place}", _values(expected[first][name]), came, advice)
    clauses = {rank: str(observations[rank].facts.get(name, "nothing")) for rank in culprits}
    clause, who = clauses[first], ranks(culprits) if right else "every rank"
    refused = all(str(observations[fact.rank].facts.get(fact.name)).startswith(_RAISED) for fact in wrong)
    if _NO_METHOD in clause and (lacking := method(name)):
        return _lacks(lacking, who, clause.removeprefix(_RAISED), advice, refused=refused)
    raised = f"{who} raised in {name}: {clause.removeprefix(_RAISED)}"
    return Breakage(
        raised if clause.startswith(_RAISED) else f"{name}: {place}: {clause}",
        came="\n".join(f"rank {rank}: {said}" for rank, said in clauses.items()),
        advice=advice,
        refused=refused,
    )


def _where(observation: Observation) -> str:
    """Return e.g. `broadcast #0 (4 x float32)` or `future.wait() after all_reduce #0 (...)`."""
    last = observation.history[-1].describe() if observation.history else ""
    phase = "" if observation.phase == "start" else observation.phase
    return " after ".join(filter(None, (phase, last))) or "the program, outside of what it tries"


def _values(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() <= _NUM_VALUES:
        numbers = ", ".join(_number(number) for number in value.to_dense().reshape(-1).tolist())
        return f"[{numbers}] ({kind(value)})"
    return show(value)


def _number(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _frames(observation: Observation) -> tuple[str, ...]:
    """Return the innermost frames of the main thread, the latest call first."""
    frames = (line for line in observation.frames if not any(part in line for part in OUR_FRAMES))
    return tuple(frames)[:_NUM_FRAMES]


def _odd_one_out(late: list[Observation]) -> int | None:
    """Return the one rank whose threads are elsewhere than those of all others, which are in one place; else None."""
    places = [
        tuple(line for line in one.stack.splitlines() if line.strip() and not line.startswith(("Thread", "Current")))
        for one in late
    ]
    odd = [one.rank for one, place in zip(late, places, strict=True) if place and places.count(place) == 1]
    return odd[0] if len(late) > 2 and len(odd) == 1 and len(set(places)) == 2 else None


def _stacks(observations: list[Observation]) -> str:
    """Return every distinct stack once, with its ranks; the rarest first."""
    owners: dict[tuple[str, ...], list[int]] = {}
    for one in observations:
        if frames := _frames(one):
            owners.setdefault(frames, []).append(one.rank)
    rarest_first = sorted(owners.items(), key=lambda item: len(item[1]))
    return "\n".join(
        f"Stack of {ranks(whose)}, the latest call first:\n" + "\n".join(frames) for frames, whose in rarest_first
    )


def _other_threads(late: list[Observation], guilty: list[int]) -> str:
    """Return what the other Python threads of the guilty rank do: the transport of a group in Python is one of them.

    Where no rank is known to be guilty, those of the first.
    """
    one = next((each for each in late if each.rank in guilty), late[0])
    threads: list[list[str]] = []
    for line in one.stack.splitlines():
        if line.startswith(("Thread", "Current thread")):
            threads.append([])
        elif threads and line.strip() and not any(part in line for part in OUR_FRAMES):
            threads[-1].append(line)
    shown = ["\n".join(frames[:_NUM_FRAMES]) for frames in threads[:-1] if frames]  # the main thread comes last
    return "\n".join(f"Another thread of rank {one.rank}:\n{frames}" for frames in shown)


def _stderr(observation: Observation) -> str:
    lines = observation.stderr.strip().splitlines()[-_STDERR_LINES:]
    return f"End of rank {observation.rank}'s stderr:\n" + "\n".join(lines) if lines else ""
