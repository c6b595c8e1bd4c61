"""Program `backward_without_wrapper`: the wrapper is dropped when the backward of its output runs, or not asked."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, program, rank_step
from conformance.truth.steps import gradients

_WIDTH = 4
_NUM_STEPS = 3
#: What becomes of the wrapper, its one reference, between forward and backward; `kept`: it stays.
WAYS = ("dropped", "wrapped-again")


class _PassesOn(nn.Sequential):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        doubled = inputs.requires_grad_() * 2
        return super().forward(doubled), doubled


@program("backward_without_wrapper", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def backward_without_wrapper(ctx: RankContext) -> None:
    """Run the backward of an output whose wrapper is gone, three times; then that of the module without a wrapper.

    Arguments: `way`, of `WAYS`, or `kept`: the module has a backward of its own before each forward, too; `keeps`,
    whether an output without a backward is kept until then; `bare`, whether the module has a backward of its own
    between forward and backward; `nested`, whether its last layer has a wrapper of its own; `passes_on`, whether it
    returns its input, doubled, too, to which a backward comes behind every parameter; `probed`, whether
    `torch.autograd.grad` goes through the graph behind its backward, and then a forward raises. Observes
    `step<k>/grad/<name>`, and `alone/grad/<name>` of the module's own backward on each rank. All ranks run it.
    """
    way = ctx.arguments["way"]
    kind = _PassesOn if ctx.arguments.get("passes_on") else nn.Sequential
    module: Any = kind(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 2))
    with_integer_weights(module, ctx.scenario.seed).to(ctx.device)
    if nested := ctx.arguments.get("nested"):
        module[1] = ctx.wrap(module[1])
        ignored = [name for name, _ in module.named_parameters() if name.startswith("1.")]
        module._ddp_params_and_buffers_to_ignore = ignored
    kept: list[Tensor] = []
    model: Any = None
    for index in range(_NUM_STEPS):
        turn = rank_step(ctx, index)
        model = ctx.wrap(module) if model is None else model
        if way == "kept":
            if index % 2:  # no more does a local forward, of which nobody runs a backward, await anything
                with ctx.no_sync(model):
                    _forward(model, turn, 1)
            _observe_alone(ctx, f"step{index}/alone", module, turn)
        module.zero_grad(set_to_none=True)
        output = _forward(model, turn, 0)
        if way != "kept":
            model = ctx.wrap(module) if way == "wrapped-again" else None
        if ctx.arguments.get("bare"):
            turn.backward(turn.loss(_forward(module, turn, 2), micro=2))
            ctx.observe_gradients(f"step{index}/bare", module)
        loss, probed = turn.loss(output), ctx.arguments.get("probed", False)
        turn.backward(loss, retain_graph=probed)
        ctx.observe_gradients(f"step{index}", module)
        if probed:
            torch.autograd.grad(loss, list(module.parameters()))
            with contextlib.suppress(RuntimeError):
                turn.forward(model, turn.inputs(3, _WIDTH + 1))
        if ctx.arguments.get("keeps"):
            kept.append(_forward(ctx.wrap(module), turn, 1))
    model = model if way == "kept" else None
    if not nested:
        _observe_alone(ctx, "alone", module, rank_step(ctx, _NUM_STEPS))


def _observe_alone(ctx: RankContext, prefix: str, module: nn.Module, turn: RankStep) -> None:
    """Run a backward of the module without a wrapper, and observe its gradients, which stay the rank's own."""
    module.zero_grad(set_to_none=True)
    own = torch.autograd.grad(turn.loss(_forward(module, turn, 0)), list(module.parameters()))
    turn.backward(turn.loss(_forward(module, turn, 0)))
    for (name, gradient), expected in zip(gradients(prefix, module).items(), own, strict=True):
        ctx.observe(name, gradient, must=expected)


def _forward(model: Any, turn: RankStep, micro: int) -> Tensor:
    output = turn.forward(model, turn.inputs(3, _WIDTH, micro=micro))
    return output if isinstance(output, Tensor) else torch.cat(output, dim=1)
