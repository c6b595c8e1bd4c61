"""Program `backward_without_wrapper`: the wrapper has been dropped when the backward of its output runs."""

from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, program, rank_step
from conformance.truth.steps import gradients

_WIDTH = 4
_NUM_STEPS = 3
#: What becomes of the wrapper, its one reference, between forward and backward.
WAYS = ("dropped", "wrapped-again")


@program("backward_without_wrapper", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def backward_without_wrapper(ctx: RankContext) -> None:
    """Run the backward of an output whose wrapper is gone, three times; then that of the module without a wrapper.

    Arguments: `way`, of `WAYS`; `keeps`, whether an output without a backward is kept until then; `bare`, whether the
    module has a backward of its own before; `nested`, whether its last layer has a wrapper of its own. Observes
    `step<k>/grad/<name>`, and `alone/grad/<name>` of the module's own backward on each rank. All ranks run it.
    """
    module: Any = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 2))
    with_integer_weights(module, ctx.scenario.seed).to(ctx.device)
    if nested := ctx.arguments.get("nested"):
        module[1] = ctx.wrap(module[1])
        ignored = [name for name, _ in module.named_parameters() if name.startswith("1.")]
        module._ddp_params_and_buffers_to_ignore = ignored
    kept: list[Tensor] = []
    model: Any = None
    for index in range(_NUM_STEPS):
        module.zero_grad(set_to_none=True)
        turn = rank_step(ctx, index)
        model = ctx.wrap(module) if model is None else model
        output = _forward(model, turn, 0)
        model = ctx.wrap(module) if ctx.arguments["way"] == "wrapped-again" else None
        if ctx.arguments.get("bare"):
            turn.backward(turn.loss(_forward(module, turn, 2), micro=2))
            ctx.observe_gradients(f"step{index}/bare", module)
        turn.backward(turn.loss(output))
        ctx.observe_gradients(f"step{index}", module)
        if ctx.arguments.get("keeps"):
            kept.append(_forward(ctx.wrap(module), turn, 1))
    model = None
    if nested:
        return
    module.zero_grad(set_to_none=True)
    turn = rank_step(ctx, _NUM_STEPS)
    own = torch.autograd.grad(turn.loss(_forward(module, turn, 0)), list(module.parameters()))
    turn.backward(turn.loss(_forward(module, turn, 0)))
    for (name, gradient), expected in zip(gradients("alone", module).items(), own, strict=True):
        ctx.observe(name, gradient, must=expected)


def _forward(model: Any, turn: RankStep, micro: int) -> Tensor:
    output: Tensor = turn.forward(model, turn.inputs(3, _WIDTH, micro=micro))
    return output
