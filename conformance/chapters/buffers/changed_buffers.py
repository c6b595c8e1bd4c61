"""Program `changed_buffers`: every rank changes a buffer between two steps, all alike or each as it likes."""

from collections.abc import Callable, Mapping

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

    Observes `raised`, what the second step raised, and if that must be nothing, the buffer after it. All ranks run it.
    """
    first, others = ctx.arguments["first"], ctx.arguments["others"]
    module = with_integer_weights(nn.Linear(3, 2), ctx.scenario.seed).to(ctx.device)
    module.register_buffer("mean", torch.full((2,), float(ctx.rank), device=ctx.device))
    model = ctx.wrap(module)
    for step in range(2):
        turn = rank_step(ctx, step)
        with ctx.catching(f"raised{step}"):
            turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))
        changed = CHANGES[others if ctx.rank else first]()
        if step == 0:
            module.register_buffer("mean", None if changed is None else (changed + ctx.rank).to(ctx.device))
    if first == others:
        ctx.observe("mean", module.mean)


@changed_buffers.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    if scenario.arguments["first"] == scenario.arguments["others"]:
        return truth_of(scenario)
    refused = {"raised0": None, "raised1": Raises(("RuntimeError",), ("mean",))}
    return dict.fromkeys(range(scenario.world_size), refused)
