"""Program `kept_wrappers`: one rank keeps wrappers that the others drop, and all continue to train."""

import copy
import gc
from typing import Any

from torch import Tensor, nn

from conformance.chapters.neighbours.user_collectives import summed
from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps

_WIDTH = 3
_NUM_STEPS = 3

#: Which wrappers one rank keeps: one of another module, that trains no more, those of the module that all train, or a
#: copy of one of these, which no other code has made.
KEPT = ("another", "earlier", "copy")


class _Layers(nn.Module):
    """Two layers, between which the user sums over the ranks, in forward and in backward."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 2)
        self.group = group

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.first(rows)
        output: Tensor = self.last(2 * hidden - summed(hidden, self.group))
        return output


@program("kept_wrappers", invariants=("same_collectives", "leaves_no_trace"))
def kept_wrappers(ctx: RankContext) -> None:
    """Wrap a module twice in every step, with a forward of the first before the second is there, and one backward.

    The last rank keeps wrappers, and the others none: argument `kept`, one of `KEPT`. Observes the gradients of every
    step. All ranks run it.
    """
    observe_run(ctx, lambda: _train(ctx, ctx.arguments["kept"]))


def _train(ctx: RankContext, which: str) -> dict[str, Any]:
    kept: list[nn.Module] = []

    def let_go_of(*wrappers: nn.Module) -> None:
        if ctx.rank == ctx.world_size - 1:
            kept.extend(wrappers)

    if which == "another":
        let_go_of(ctx.wrap(with_integer_weights(nn.Linear(_WIDTH, 2), ctx.scenario.seed).to(ctx.device)))
    module = with_integer_weights(_Layers(ctx.process_group), ctx.scenario.seed).to(ctx.device)

    def step(_: Any, turn: RankStep) -> None:
        gc.collect()
        first = ctx.wrap(module)
        if which == "copy" and ctx.rank == ctx.world_size - 1:
            kept.append(copy.deepcopy(first, {id(ctx.process_group): ctx.process_group}))
        ahead = turn.loss(turn.forward(first, turn.inputs(2, _WIDTH)))
        second = ctx.wrap(module)
        turn.backward(ahead + turn.loss(turn.forward(second, turn.inputs(2, _WIDTH, micro=1)), micro=1))
        if which == "earlier":
            let_go_of(first, second)

    return run_steps(ctx, module, None, step, _NUM_STEPS)
