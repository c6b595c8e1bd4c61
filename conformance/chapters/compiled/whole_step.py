"""Program `compiled_step`: a function that runs forward and backward of a step is compiled, and not the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from conformance.chapters.compiled.compiling import PRELOAD, OwnSequence, compiling
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.scenario import Scenario
from conformance.truth.steps import simulate_steps

_NUM_STEPS = 4
#: More parameters than torch recompiles a function for, so that a hook of each may not be compiled.
_NUM_LAYERS = 6


def _build(scenario: Scenario) -> nn.Module:
    return with_integer_weights(OwnSequence(*(nn.Linear(2, 2) for _ in range(_NUM_LAYERS))), scenario.seed)


def _backward(model: Any, inputs: torch.Tensor) -> None:
    (model(inputs).sum() * 144).backward()


def _step(model: Any, turn: RankStep) -> None:
    _backward(model, turn.inputs(3, 2))


@program("compiled_step", invariants=("nothing_in_flight", "leaves_no_trace"), preload=PRELOAD)
def compiled_step(ctx: RankContext) -> None:
    """Train with a compiled step; reaching the limit of recompilations is an error. Observes gradients.

    All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    model = ctx.wrap(module)
    with compiling(ctx) as (inside, _), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        call = inside.compile(_backward)

        def step(wrapped: Any, turn: RankStep) -> None:
            call(wrapped, turn.inputs(3, 2))

        observe_run(ctx, lambda: run_steps(ctx, module, model, step, _NUM_STEPS))


@compiled_step.expects
def _stepped(scenario: Scenario) -> Mapping[int, Facts]:
    return simulate_steps([_build(scenario) for _ in range(scenario.world_size)], _step, _NUM_STEPS)
