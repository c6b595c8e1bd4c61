"""Program `one_or_several`: one rank runs through several wrappers in one backward, and the others in one each."""

import copy
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps

_WIDTH = 3
_NUM_STEPS = 4

#: What the wrappers communicate over: the same group or one each, of all ranks or of two ranks each.
GROUPS = ("same", "own", "rings")


@program("one_or_several", invariants=("leaves_no_trace",))
def one_or_several(ctx: RankContext) -> None:
    """Train wrappers side by side for four steps; rank 0 has one backward for all of them from some step on.

    Arguments: `groups`, one of `GROUPS`; `joins_from`, that step; `copied`, whether ranks train copies of the wrappers,
    which each makes in an order of its own, and all have one backward for all. The wrapper with number `searches` is
    built last, and alone has `find_unused_parameters`. Observes the gradients of every step. All ranks run it.
    """
    groups, copied = _groups(ctx, ctx.arguments["groups"]), ctx.arguments.get("copied", False)
    observe_run(ctx, lambda: _train(ctx, groups, ctx.arguments["joins_from"], copied=copied))
    for group in groups:
        if isinstance(group, dist.ProcessGroup) and group is not ctx.process_group:
            dist.destroy_process_group(group)


def _train(ctx: RankContext, groups: Sequence[Any], joins_from: int, *, copied: bool) -> dict[str, Any]:
    inner = nn.ModuleDict()
    made: dict[int, Any] = {}
    searches = ctx.arguments.get("searches")
    for index, group in sorted(enumerate(groups), key=lambda numbered: numbered[0] == searches):
        if isinstance(group, dist.ProcessGroup):
            layer = nn.Linear(_WIDTH, _WIDTH + index)
            inner[str(index)] = with_integer_weights(layer, ctx.scenario.seed, index).to(ctx.device)
            options = {"find_unused_parameters": True} if index == searches else {}
            made[index] = ctx.wrap(inner[str(index)], process_group=group, **options)
    wrappers = [made[index] for index in sorted(made)]
    if copied:
        wrappers = _copies(ctx, wrappers)
        inner = nn.ModuleDict({str(index): wrapper.module for index, wrapper in enumerate(wrappers)})

    def step(_: Any, turn: RankStep) -> None:
        losses = [
            turn.loss(turn.forward(wrapper, turn.inputs(2, _WIDTH, micro=index)), micro=index)
            for index, wrapper in enumerate(wrappers)
        ]
        if turn.step >= joins_from and (ctx.rank == 0 or copied):
            turn.backward(sum(losses[1:], losses[0]))
        else:
            # In the order of one backward: what forward has run last is first. In rings there is no such order.
            for loss in losses if ctx.arguments["groups"] == "rings" else reversed(losses):
                turn.backward(loss)

    return run_steps(ctx, inner, None, step, _NUM_STEPS)


def _groups(ctx: RankContext, groups: str) -> list[Any]:
    if groups == "same":
        return [ctx.process_group] * 2
    ranks = range(ctx.world_size)
    if groups == "own":
        return [dist.new_group(list(ranks)) for _ in range(2)]
    return [dist.new_group(sorted({rank, (rank + 1) % ctx.world_size})) for rank in ranks]


def _copies(ctx: RankContext, wrappers: list[Any]) -> list[Any]:
    """Return copies of `wrappers` in their order; odd ranks have made the last one first."""
    memo = {id(ctx.process_group): ctx.process_group}
    indices = list(range(len(wrappers)))
    made = {index: copy.deepcopy(wrappers[index], dict(memo)) for index in (indices[::-1] if ctx.rank % 2 else indices)}
    return [made[index] for index in indices]
