"""Program `unfrozen_parts`: a part is frozen while one wrapper is built, and trained by a wrapper of its own."""

from typing import Any

from torch import nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps

_WIDTH = 3
_NUM_STEPS = 3

#: Which wrapper is built first, that of the part or that of the whole module, and whether one backward runs through
#: both, or each has its own, as a generator's and a discriminator's.
FIRST = ("part", "whole")
BACKWARDS = ("together", "in_turns")


@program("unfrozen_parts", invariants=("same_collectives", "leaves_no_trace"))
def unfrozen_parts(ctx: RankContext) -> None:
    """Wrap a module of which a part is frozen just then, wrap the part as well, and train both for three steps.

    Arguments: `first`, one of `FIRST`; `backward`, one of `BACKWARDS`. What a backward of the whole module alone brings
    the part, the loop drops. Observes the gradients of every step. All ranks run it.
    """
    observe_run(ctx, lambda: _train(ctx, ctx.arguments["first"], ctx.arguments["backward"]))


def _train(ctx: RankContext, first: str, backward: str) -> dict[str, Any]:
    part = with_integer_weights(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 2)), ctx.scenario.seed)
    before = with_integer_weights(nn.Linear(_WIDTH, _WIDTH), ctx.scenario.seed)
    whole = nn.Sequential(before, part).to(ctx.device)
    wrapped = {}
    for name in FIRST if first == FIRST[0] else reversed(FIRST):
        part.requires_grad_(name == "part")
        wrapped[name] = ctx.wrap(part if name == "part" else whole)
    part.requires_grad_(True)

    def step(model: nn.Module, turn: RankStep) -> None:
        ahead = turn.loss(turn.forward(model, turn.inputs(2, _WIDTH)))
        if backward == "in_turns":
            turn.backward(ahead)
            part.zero_grad()
        apart = turn.loss(turn.forward(wrapped["part"], turn.inputs(2, _WIDTH, micro=1)), micro=1)
        turn.backward(apart if backward == "in_turns" else ahead + apart)

    return run_steps(ctx, whole, wrapped["whole"], step, _NUM_STEPS)
