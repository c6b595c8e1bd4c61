"""Program `disagreement`: one rank gives an argument of the constructor another value than the others."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from conformance.models.integers import with_integer_weights
from conformance.models.low_precision import precision_option
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, run_steps, step_on
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Raises
from conformance.truth.steps import simulate_steps

_NUM_STEPS = 3
_step = step_on(4, 3)
#: An argument of parameters: scenarios have their names.
_DELAYED = "delay_all_reduce_named_params"

#: What is unlike -> what the others give, and the odd rank. The lists of caps agree in their ends.
DISAGREEMENTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    **{
        name: ({name: usual}, {name: odd})
        for name, usual, odd in (
            ("init_sync", True, False),
            ("broadcast_buffers", True, False),
            ("forward_sync_buffers", True, False),
            ("bucket_cap_mb", 25, 1e-5),
            ("bucket_cap_mb_list", [1e-6, 1e-6, 1.0], [1e-6, 1.0]),
            ("find_unused_parameters", False, True),
            ("gradient_as_bucket_view", False, True),
            ("static_graph", False, True),
            ("skip_all_reduce_unused_params", False, True),
            ("batched_grad_copy", False, True),
            ("mixed_precision", {}, {"reduce_dtype": "float64"}),
        )
    },
    _DELAYED: ({_DELAYED: ["0.weight"]}, {_DELAYED: ["0.bias"]}),
    "bucket_cap_auto": ({"bucket_cap_mb": 25}, {"bucket_cap_mb": "auto"}),
}
#: What a DDP must have, besides what the others give, to be given this.
NEEDS: Mapping[str, tuple[str, ...]] = {_DELAYED: ("delay_all_reduce",), "bucket_cap_auto": ("auto_buckets",)}
#: Words of which an error must hold one, where they are not the argument's name.
_NAMES = {
    "broadcast_buffers": ("broadcast_buffers", "forward_sync_buffers"),
    "bucket_cap_mb": ("bucket",),
    "bucket_cap_mb_list": ("bucket",),
    "bucket_cap_auto": ("bucket",),
    "mixed_precision": ("reduce dtype", "reduce_dtype", "mixed_precision"),
    _DELAYED: ("delay",),
}


def _build(scenario: Scenario) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module.register_buffer("table", torch.ones(3))
    return with_integer_weights(module, scenario.seed)


def _made(given: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return options as a DDP takes them."""
    options = {**given, **precision_option(given)}
    if _DELAYED in options:
        options[_DELAYED] = [(each, module.get_parameter(each)) for each in options[_DELAYED]]
        options["param_to_hook_all_reduce"] = module.get_parameter("1.weight")
    return options


@program("disagreement", invariants=("refuses_together", "leaves_no_trace"))
def disagreement(ctx: RankContext) -> None:
    """Wrap equal modules, rank `odd` with the other options of `DISAGREEMENTS[argument]`, and train three steps.

    Observes `outcome`: the gradients, or the error of the constructor or of a step. All ranks run it.
    """
    name = ctx.arguments["argument"]
    given = DISAGREEMENTS[name][ctx.rank == ctx.arguments["odd"]]

    def train() -> dict[str, Any]:
        module = _build(ctx.scenario).to(ctx.device)
        return run_steps(ctx, module, ctx.wrap(module, **_made(given, module)), _step, _NUM_STEPS)

    observe_run(ctx, train, may_refuse=True)


@disagreement.expects
def _right_or_refused(scenario: Scenario) -> Mapping[int, Facts]:
    name = scenario.arguments["argument"]
    truth = simulate_steps([_build(scenario) for _ in range(scenario.world_size)], _step, _NUM_STEPS)
    refusal = Raises(("RuntimeError", "ValueError"), (_NAMES.get(name, (name,)),))
    return {rank: {"outcome": AnyOf(dict(facts), refusal)} for rank, facts in truth.items()}
