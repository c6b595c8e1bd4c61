"""Programs `subgroups`: two DDPs at once, each in its own group; `destroyed_group`: one that outlives its group."""

from typing import Any

import torch.distributed as dist
from torch import nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps, step_on
from conformance.truth.expected import Raises

NUM_STEPS = 3
_step = step_on(4, 3)


def groups_of(world_size: int) -> list[list[int]]:
    """Return the ranks of the two groups: the lower half and the rest."""
    half = world_size // 2
    return [list(range(half)), list(range(half, world_size))]


def _build(group: int) -> nn.Module:
    """Return a module of the group's own: different weights and even different shapes."""
    return with_integer_weights(nn.Sequential(nn.Linear(3, 3 + group), nn.Linear(3 + group, 2)), group)


@program("subgroups", invariants=("leaves_no_trace",))
def subgroups(ctx: RankContext) -> None:
    """Train another module in each of two groups; the groups' sizes differ where the world size is odd.

    With argument `wrappers`, so many modules in each, one behind the other. Observes gradients, and
    `uses_own_group_only`: whether every collective since construction went through it. All ranks run it.
    """
    memberships = groups_of(ctx.world_size)
    made = [dist.new_group(ranks, use_local_synchronization=False) for ranks in memberships]
    mine = next(index for index, ranks in enumerate(memberships) if ctx.rank in ranks)
    before = len(ctx.collectives())
    models = []

    def train() -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for number in range(ctx.arguments.get("wrappers", 1)):
            module = _build(mine + 2 * number).to(ctx.device)
            models.append(ctx.wrap(module, process_group=made[mine]))
            of_module = run_steps(ctx, module, models[-1], _step, NUM_STEPS)
            facts |= {f"{name} of module {number}" if number else name: value for name, value in of_module.items()}
        return facts

    observe_run(ctx, train)
    names = {collective.group for collective in ctx.collectives()[before:]}
    ctx.observe("uses_own_group_only", len(names) == 1 and "default" not in names, must=True)
    dist.barrier(group=ctx.process_group)
    dist.destroy_process_group(made[mine])


@program("destroyed_group", invariants=("leaves_no_trace",))
def destroyed_group(ctx: RankContext) -> None:
    """Train 3 steps in a group of the module's own, which the user destroys behind the first.

    Observes `outcome`: the gradients of all steps, or what was raised in place of them. All ranks run it.
    """
    group = dist.new_group(list(range(ctx.world_size)))
    module = _build(0).to(ctx.device)
    model = ctx.wrap(module, process_group=group)

    def step(model: nn.Module, turn: RankStep) -> None:
        _step(model, turn)
        if turn.step == 0:
            dist.destroy_process_group(group)

    observe_run(
        ctx, lambda: run_steps(ctx, module, model, step, NUM_STEPS), refusal=Raises(("RuntimeError", "ValueError"))
    )
