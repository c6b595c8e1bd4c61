"""Hand-made histories, observations and scenarios for the tests of checkers and judge."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance.checkers.checker import Evidence
from conformance.observation import Collective, Ending, Facts, Observation, Raised
from conformance.programs.registry import Program
from conformance.scenario import Scenario

SCENARIO = Scenario("gradients/GRAD-01/by-hand", ("GRAD-01",), "by_hand", seed=7)
PROGRAM = Program("by_hand", lambda ctx: None)


def collective(index: int = 0, numel: int = 4, op: str = "all_reduce", **changes: Any) -> Collective:
    """Return a finished collective of one float32 tensor in backward of step 0, changed by `changes`."""
    reduce_op = "sum" if "reduce" in op else ""
    plain = Collective(index, op, "default", ((numel,),), ("float32",), reduce_op, phase="backward", step=0)
    return replace(plain, **changes)


def gradients(*sizes: int, step: int = 0, first: int = 0, **changes: Any) -> tuple[Collective, ...]:
    """Return one gradient all-reduce per size, as one synchronised backward issues them."""
    return tuple(collective(first + number, size, step=step, **changes) for number, size in enumerate(sizes))


def returned(rank: int, history: tuple[Collective, ...] = (), facts: Facts | None = None, **rest: Any) -> Observation:
    return Observation(rank, Ending("returned"), {"done": True} if facts is None else facts, history=history, **rest)


def raised(
    rank: int,
    error: Exception,
    history: tuple[Collective, ...] = (),
    traceback: str = "",
    facts: Facts = {"begun": True},  # noqa: B006 - nobody changes it
) -> Observation:
    return Observation(
        rank,
        Ending("raised"),
        raised=Raised.of(error, traceback),
        history=history,
        phase="backward",
        facts=facts,
    )


def ended(rank: int, kind: str, history: tuple[Collective, ...] = (), **rest: Any) -> Observation:
    detail = {"killed": "killed by SIGKILL", "exited": "exited 3"}.get(kind, kind)
    rest = {"phase": "backward", **rest}
    return Observation(rank, Ending(kind, 3, detail), history=history, **rest)


def evidence_of(*observations: Observation, expected: Mapping[int, Facts] | None = None, **scenario: Any) -> Evidence:
    changed = SCENARIO.replace(world_size=len(observations), **scenario)
    return Evidence(changed, {observation.rank: observation for observation in observations}, expected)
