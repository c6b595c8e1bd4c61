"""Programs in which ranks change a buffer between two steps: all alike, each as it likes, or one rank alone."""

import gc
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch import Tensor, nn

from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step, truth_of
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

#: Each change -> the buffer that it leaves, None if none. Each holds the rank's own number before it is copied.
CHANGES: Mapping[str, Callable[[], Tensor | None]] = {
    "dtype": lambda: torch.zeros(2, dtype=torch.float64),
    "smaller": lambda: torch.zeros(1),
    "larger": lambda: torch.zeros(4),
    "gone": lambda: None,
}


@program("changed_buffers", invariants=("leaves_no_trace",))
def changed_buffers(ctx: RankContext) -> None:
    """Take a step, change buffer `mean` as argument `first` says on rank 0 and `others` elsewhere, and take another.

    With `at_once` there is no step before the change. Observes `raised`, what the last step raised, and if that must be
    nothing, the buffer after it. All ranks run it.
    """
    first, others = ctx.arguments["first"], ctx.arguments["others"]
    last = 0 if ctx.arguments.get("at_once") else 1
    module = with_integer_weights(nn.Linear(3, 2), ctx.scenario.seed).to(ctx.device)
    module.register_buffer("mean", torch.full((2,), float(ctx.rank), device=ctx.device))
    model = ctx.wrap(module)
    for step in range(last + 1):
        turn = rank_step(ctx, step)
        changed = CHANGES[others if ctx.rank else first]()
        if step == last:
            module.register_buffer("mean", None if changed is None else (changed + ctx.rank).to(ctx.device))
        with ctx.catching(f"raised{step}"):
            turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))
    if first == others:
        ctx.observe("mean", module.mean)


@changed_buffers.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    if scenario.arguments["first"] == scenario.arguments["others"]:
        return truth_of(scenario)
    refusal = Raises(("RuntimeError",), ("mean",))
    refused = {"raised0": refusal} if scenario.arguments.get("at_once") else {"raised0": None, "raised1": refusal}
    return dict.fromkeys(range(scenario.world_size), refused)


#: How long the others wait in vain, and a rank that waits for the group's timeout: longer than the scenario may take.
_OTHERS_WAIT, _TIMEOUT = timedelta(seconds=6), timedelta(seconds=300)


@program("lone_change", invariants=("leaves_no_trace",))
def lone_change(ctx: RankContext) -> None:
    """Take a step, change buffer `mean` as argument `change` says on rank `odd` alone, and take another.

    The odd rank has a longer timeout than the others, so that it raises before its own or not at all.

    `starts_with`: the buffers before. With `later` another wrapper has trained, waited for the others and is gone.
    Observes `raised`, what the second step raised. All ranks run it.
    """
    module = with_integer_weights(nn.Linear(3, 2), ctx.scenario.seed).to(ctx.device)
    for name in ctx.arguments["starts_with"]:
        module.register_buffer(name, torch.full((2,), float(ctx.rank), device=ctx.device))
    is_odd = ctx.rank == ctx.arguments["odd"]
    if ctx.arguments.get("later"):
        first = ctx.wrap(nn.Linear(3, 2).to(ctx.device))
        turn = rank_step(ctx, 9)
        turn.backward(turn.loss(turn.forward(first, turn.inputs(4, 3))))
        del first
        gc.collect()
    with ctx.group_with_timeout(_TIMEOUT if is_odd else _OTHERS_WAIT) as group:
        model = ctx.wrap(module, process_group=group)
        for step in range(2):
            turn = rank_step(ctx, step)
            with ctx.catching(f"raised{step}"):
                turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))
            if step == 0 and is_odd:
                module.register_buffer("mean", CHANGES[ctx.arguments["change"]]())


@lone_change.expects
def _named(scenario: Scenario) -> Mapping[int, Facts]:
    refused = {"raised0": None, "raised1": Raises(("RuntimeError",), ("mean", f"rank {scenario.arguments['odd']}"))}
    return dict.fromkeys(range(scenario.world_size), refused)
