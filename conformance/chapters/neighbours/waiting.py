"""Program `waiting_beside`: a wrapper awaits a backward, and one of another wrapper comes to what the two share."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.programs.truth import truth_of
from conformance.programs.written_steps import rank_step

_WIDTH = 4
_NUM_STEPS = 3
#: Which ranks run the forward that awaits a backward, and which the backward beside it.
RANKS = {"all": lambda rank: True, "first": lambda rank: rank == 0}


@program("waiting_beside", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def waiting_beside(ctx: RankContext) -> None:
    """Have a wrapper with the scenario's options wait, let another one run a backward, then the first, three times.

    Arguments: `waits` and `runs`, the ranks that do (of `RANKS`); `beside`, whether the other's forward is "local" or
    "synchronised"; `others`, its options; `dropped`, whether the first one's forward has no backward before the next
    one's. Observes the gradients behind each backward. All ranks run it.
    """
    seed = ctx.scenario.seed
    layers: list[Any] = [with_integer_weights(nn.Linear(_WIDTH, _WIDTH), seed, key) for key in range(3)]
    shared, own, others = (layer.to(ctx.device) for layer in layers)
    model: Any = ctx.wrap(nn.Sequential(shared, own))
    beside: Any = ctx.wrap_with(nn.Sequential(shared, others), ctx.arguments.get("others", {}))
    is_local = ctx.arguments["beside"] == "local"
    for step in range(_NUM_STEPS):
        turn = rank_step(ctx, step)
        waits = RANKS[ctx.arguments["waits"]](ctx.rank)
        output = _forward(model, turn, 0) if waits else shared.weight
        if RANKS[ctx.arguments["runs"]](ctx.rank):
            with ctx.no_sync(beside) if is_local else contextlib.nullcontext():
                turn.backward(turn.loss(_forward(beside, turn, 1), micro=1))
        _observe(ctx, f"step{step}/beside", layers)
        if ctx.arguments.get("dropped"):
            output = _forward(model, turn, 2)
        turn.backward(turn.loss(output))
        _observe(ctx, f"step{step}/own", layers)
        for layer in layers:
            layer.zero_grad()


def _forward(model: Any, turn: RankStep, micro: int) -> Tensor:
    output: Tensor = turn.forward(model, turn.inputs(3, _WIDTH, micro=micro))
    return output


def _observe(ctx: RankContext, prefix: str, layers: list[Any]) -> None:
    for name, layer in zip(("shared", "own", "beside"), layers, strict=True):
        gradient = layer.weight.grad
        ctx.observe(f"{prefix}/{name}", None if gradient is None else gradient.clone())


waiting_beside.expects(truth_of)
