"""Program `neighbours`: two wrappers of one shape in one training, each of which does something else.

A step says of each wrapper whether it is synchronised, local (the step is within its `no_sync`) or idle, and in which
order forwards and backwards run. Everything that a DDP keeps once for all of its instances, such as a switch or
memory, shows in one of the products: each wrapper must have the gradients that it would have alone.
"""

import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, rank_step
from conformance.programs.join_context import joining
from conformance.scenario import Scenario
from conformance.truth.steps import gradients

WIDTH = 4
#: One backward for both; or each its own: forward and backward in turn, both forwards first, the second one inside.
ORDERS = ("joint", "separate", "crossed", "nested")
_MODES = (
    ("synchronised", "synchronised"), ("local", "synchronised"), ("synchronised", "local"), ("idle", "synchronised"),
)  # fmt: skip
#: How many steps the first wrapper makes in its join context, on rank 0 and on the others.
_IN_CONTEXT, _OF_OTHERS = 5, 3


@dataclass(frozen=True)
class Turn:
    """What a step does with each wrapper, and in which order."""

    modes: tuple[str, str]
    order: str

    @property
    def takes_part(self) -> list[int]:
        return [index for index, mode in enumerate(self.modes) if mode != "idle"]


def _plan(scenario: Scenario) -> list[Turn]:
    """Return every mode in every order, shuffled by the seed; with `joins` some, within join and after."""
    turns = [Turn(modes, order) for modes, order in itertools.product(_MODES, ORDERS)]
    random.Random(scenario.seed).shuffle(turns)
    if not scenario.arguments.get("joins"):
        return turns
    shared = [turn for turn in turns if turn.modes[0] == "synchronised"][:_OF_OTHERS]
    alone = [Turn(("synchronised", "idle"), "separate")] * (_IN_CONTEXT - _OF_OTHERS)
    return [*shared, *alone, *turns[:4]]


def _pair(scenario: Scenario) -> Any:
    """Return two modules of one shape; with `freezes` the second one trains a part of it only."""
    pair = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)) for _ in range(2)])
    if scenario.arguments.get("freezes"):
        pair[1].get_submodule("1").requires_grad_(False)
    return with_integer_weights(pair, scenario.seed)


def _step(models: Sequence[Any], plan: Turn, turn: RankStep) -> None:
    losses: list[Tensor] = []

    def forward(index: int) -> None:
        inputs = turn.inputs(2, WIDTH, micro=index)
        losses.append(turn.loss(turn.forward(models[index], inputs), micro=index))

    for index in plan.takes_part:
        forward(index)
        if plan.order == "separate":
            turn.backward(losses.pop())
    if plan.order == "joint":
        turn.backward(sum(losses, start=0 * losses[0]))
        return
    for loss in reversed(losses) if plan.order == "nested" else losses:
        turn.backward(loss)


@program("neighbours", invariants=("same_collectives", "leaves_no_trace"))
def neighbours(ctx: RankContext) -> None:
    """Train two wrappers by a plan that holds every mode in every order. All ranks run it.

    Arguments: `freezes`: the second one trains a part of its module only; `joins`: the first one begins in a join
    context, in which rank 0 has more inputs than others. Observes `step<k>/grad/<which>.<name>` of the rank's steps.
    """
    observe_run(ctx, lambda: _train(ctx))


def _train(ctx: RankContext) -> dict[str, Any]:
    pair = _pair(ctx.scenario).to(ctx.device)
    models: list[Any] = [ctx.wrap(module) for module in pair]
    plan, facts = _plan(ctx.scenario), dict[str, Any]()

    def run(index: int) -> None:
        pair.zero_grad(set_to_none=True)
        with contextlib.ExitStack() as local:
            for model, mode in zip(models, plan[index].modes, strict=True):
                if mode == "local":
                    local.enter_context(ctx.no_sync(model))
            _step(models, plan[index], rank_step(ctx, index))
        facts.update(gradients(f"step{index}", pair))

    num_joined = 0
    if ctx.arguments.get("joins"):
        num_joined = _IN_CONTEXT
        with joining(ctx, models[0].join()):
            for index in range(_OF_OTHERS if ctx.rank else _IN_CONTEXT):
                run(index)
    for index in range(num_joined, len(plan)):
        run(index)
    return facts
