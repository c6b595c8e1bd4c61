"""Program `waiting_beside`: a wrapper awaits a backward, and another wrapper's backward reaches what the two share."""

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.errors import instance
from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, program, rank_step

_WIDTH = 4
_NUM_STEPS = 3
#: Which ranks run the forward that awaits a backward, and which the backward beside it.
RANKS = {"all": lambda rank: True, "first": lambda rank: rank == 0}


class _Checkpointed(nn.Module):
    """Runs a layer again in backward, within a backward of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return instance(checkpoint(self.layer, inputs.detach().requires_grad_(), use_reentrant=True), Tensor)


@program("waiting_beside", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def waiting_beside(ctx: RankContext) -> None:
    """Have a wrapper with the scenario's options wait, let another one run a backward, then the first, three times.

    With argument `joint`, one backward goes through both instead. Arguments: `waits` and `runs`, the ranks that do (of
    `RANKS`); `beside`, whether the other's forward is "local" or "synchronised"; `others`, its options; `dropped`,
    whether the first one's forward has no backward before the next one's; `checkpointed`, the wrappers (of "own" and
    "beside") that run what they share in a reentrant checkpoint. Observes the gradients behind each backward. All ranks
    run it.
    """
    seed = ctx.scenario.seed
    layers: list[Any] = [with_integer_weights(nn.Linear(_WIDTH, _WIDTH), seed, key) for key in range(3)]
    shared, own, others = (layer.to(ctx.device) for layer in layers)
    checkpointed = ctx.arguments.get("checkpointed", ())
    first, second = (_Checkpointed(shared) if name in checkpointed else shared for name in ("own", "beside"))
    model: Any = ctx.wrap(nn.Sequential(first, own))
    beside: Any = ctx.wrap_with(nn.Sequential(second, others), ctx.arguments.get("others", {}))
    is_local = ctx.arguments["beside"] == "local"
    for step in range(_NUM_STEPS):
        for layer in layers:
            layer.zero_grad()
        turn = rank_step(ctx, step)
        if RANKS[ctx.arguments["waits"]](ctx.rank):
            output = _forward(model, turn, 0)
        if ctx.arguments.get("joint"):
            turn.backward(turn.loss(output) + turn.loss(_forward(beside, turn, 1), micro=1))
            _observe(ctx, f"step{step}/joint", layers)
            continue
        if RANKS[ctx.arguments["runs"]](ctx.rank):
            with ctx.no_sync(beside) if is_local else contextlib.nullcontext():
                turn.backward(turn.loss(_forward(beside, turn, 1), micro=1))
        _observe(ctx, f"step{step}/beside", layers)
        if ctx.arguments.get("dropped"):
            output = _forward(model, turn, 2)
        turn.backward(turn.loss(output))
        _observe(ctx, f"step{step}/own", layers)


def _forward(model: Any, turn: RankStep, micro: int) -> Tensor:
    output: Tensor = turn.forward(model, turn.inputs(3, _WIDTH, micro=micro))
    return output


def _observe(ctx: RankContext, prefix: str, layers: list[Any]) -> None:
    for name, layer in zip(("shared", "own", "beside"), layers, strict=True):
        gradient = layer.weight.grad
        ctx.observe(f"{prefix}/{name}", None if gradient is None else gradient.clone())
