"""Program `disagreement`: one rank gives an argument of the constructor another value than the others."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, run_steps, step_on
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Raises
from conformance.truth.steps import simulate_steps

_NUM_STEPS = 3
_step = step_on(4, 3)

#: Argument -> what the others give, and the odd rank.
DISAGREEMENTS: Mapping[str, tuple[Any, Any]] = {
    "init_sync": (True, False),
    "broadcast_buffers": (True, False),
    "bucket_cap_mb": (25, 1e-5),
    "find_unused_parameters": (False, True),
    "gradient_as_bucket_view": (False, True),
    "static_graph": (False, True),
    "skip_all_reduce_unused_params": (False, True),
}
#: Words of which an error must hold one, where they are not the argument's name.
_NAMES = {"broadcast_buffers": ("broadcast_buffers", "forward_sync_buffers"), "bucket_cap_mb": ("bucket",)}


def _build(scenario: Scenario) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module.register_buffer("table", torch.ones(3))
    return with_integer_weights(module, scenario.seed)


@program("disagreement", invariants=("refuses_together", "leaves_no_trace"))
def disagreement(ctx: RankContext) -> None:
    """Wrap equal modules, give `argument` its other value of `DISAGREEMENTS` on rank `odd`, and train three steps.

    Observes `outcome`: the gradients, or the error of the constructor or of a step. All ranks run it.
    """
    name = ctx.arguments["argument"]
    value = DISAGREEMENTS[name][ctx.rank == ctx.arguments["odd"]]

    def train() -> dict[str, Any]:
        module = _build(ctx.scenario).to(ctx.device)
        return run_steps(ctx, module, ctx.wrap(module, **{name: value}), _step, _NUM_STEPS)

    observe_run(ctx, train, may_refuse=True)


@disagreement.expects
def _right_or_refused(scenario: Scenario) -> Mapping[int, Facts]:
    name = scenario.arguments["argument"]
    truth = simulate_steps([_build(scenario) for _ in range(scenario.world_size)], _step, _NUM_STEPS)
    refusal = Raises(("RuntimeError", "ValueError"), (_NAMES.get(name, (name,)),))
    return {rank: {"outcome": AnyOf(dict(facts), refusal)} for rank, facts in truth.items()}
