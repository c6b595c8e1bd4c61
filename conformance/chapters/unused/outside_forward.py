"""Programs `outside_forward` and `late_gradient`: losses that use parameters outside of forward's outputs.

The gradient of such a parameter may arrive before autograd reaches an output of forward, beside it, or although the
search for unused parameters did not find the parameter. A first step shows nothing: buckets are planned again after it.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import UNIT, RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps
from conformance.truth.expected import AnyOf, Raises

NUM_STEPS = 4
WIDTH = 4


class BodyAndHeads(nn.Module):
    """A body that forward runs, and two heads that it leaves to the loss. `ends` are what a loss can begin from."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)
        self.spare = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor, returns: str = "") -> Any:
        hidden: Tensor = self.body(inputs)
        return (hidden, self.get_parameter(returns)) if returns else hidden


def _decay(*parameters: Tensor) -> Tensor:
    """Return a penalty on weights; like every loss here it gives gradients whose mean is exact."""
    return UNIT * sum((parameter.square().sum() for parameter in parameters), parameters[0].new_zeros(()))


def _head(model: Any, turn: RankStep) -> None:
    hidden = turn.forward(model, turn.inputs(3, WIDTH))
    turn.backward(turn.loss(model.module.head(hidden)))


def _penalty(model: Any, turn: RankStep) -> None:
    loss = turn.loss(turn.forward(model, turn.inputs(3, WIDTH)))
    turn.backward(loss + _decay(*model.module.parameters()))


def _penalty_on_one(model: Any, turn: RankStep) -> None:
    loss = turn.loss(turn.forward(model, turn.inputs(3, WIDTH)))
    turn.backward(loss + _decay(model.module.spare.weight))


def _penalty_backward_first(model: Any, turn: RankStep) -> None:
    loss = turn.loss(turn.forward(model, turn.inputs(3, WIDTH)))
    turn.backward(_decay(model.module.spare.weight))
    turn.backward(loss)


def _penalties_backward_first(model: Any, turn: RankStep) -> None:
    loss = turn.loss(turn.forward(model, turn.inputs(3, WIDTH)))
    for layer in (model.module.spare, model.module.head):
        turn.backward(_decay(layer.weight))
    turn.backward(loss)


def _body_backward_first(model: Any, turn: RankStep) -> None:
    loss = turn.loss(turn.forward(model, turn.inputs(3, WIDTH)))
    turn.backward(turn.loss(model.module.body(turn.inputs(2, WIDTH, micro=1)), micro=1))
    turn.backward(loss)


def _returned(model: Any, turn: RankStep) -> None:
    hidden, weight = turn.forward(model, turn.inputs(3, WIDTH), returns="head.weight")
    turn.backward(turn.loss(hidden) + _decay(weight))


def _returned_alone(model: Any, turn: RankStep) -> None:
    _, weight = turn.forward(model, turn.inputs(3, WIDTH), returns="head.weight")
    turn.backward(_decay(weight))


def _head_alone(model: Any, turn: RankStep) -> None:
    turn.forward(model, turn.inputs(3, WIDTH))
    turn.backward(turn.loss(model.module.head(turn.inputs(2, WIDTH, micro=1))))


def _body_again(model: Any, turn: RankStep) -> None:
    hidden = turn.forward(model, turn.inputs(3, WIDTH))
    turn.backward(turn.loss(hidden) + turn.loss(model.module.body(turn.inputs(2, WIDTH, micro=1)), micro=1))


def _both_heads(model: Any, turn: RankStep) -> None:
    hidden = turn.forward(model, turn.inputs(3, WIDTH))
    inner = model.module
    turn.backward(turn.loss(inner.head(hidden)) + turn.loss(inner.spare(hidden), micro=1))


def _head_on_rank_0(model: Any, turn: RankStep) -> None:
    hidden = turn.forward(model, turn.inputs(3, WIDTH))
    inner = model.module
    turn.backward(turn.loss(inner.head(hidden) if turn.rank == 0 else inner.spare(hidden)))


def _two_losses(model: Any, turn: RankStep) -> None:
    hidden = turn.forward(model, turn.inputs(3, WIDTH))
    turn.backward(turn.loss(model.module.head(hidden)), retain_graph=True)
    turn.backward(turn.loss(hidden, micro=1))


USES: Mapping[str, Callable[[Any, RankStep], None]] = {
    "head": _head,
    "penalty": _penalty,
    "penalty_on_one": _penalty_on_one,
    "penalty_backward_first": _penalty_backward_first,
    "penalties_backward_first": _penalties_backward_first,
    "body_backward_first": _body_backward_first,
    "returned": _returned,
    "returned_alone": _returned_alone,
    "head_alone": _head_alone,
    "body_again": _body_again,
    "both_heads": _both_heads,
    "head_on_rank_0": _head_on_rank_0,
    "two_losses": _two_losses,
}


@program("outside_forward", invariants=("leaves_no_trace",))
def outside_forward(ctx: RankContext) -> None:
    """Train steps in the way that argument `use` names; a DDP may refuse, unless argument `trains` is true.

    All ranks run it. Observes `outcome`: `step<k>/grad/<name>` of all steps, or the exception that was raised; each
    gradient by itself where none may be.
    """
    module = with_integer_weights(BodyAndHeads(), ctx.scenario.seed).to(ctx.device)
    step = USES[ctx.arguments["use"]]
    refusal = None if ctx.arguments.get("trains") else Raises(("RuntimeError",))
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS), refusal=refusal)


@program("late_gradient", invariants=("leaves_no_trace",))
def late_gradient(ctx: RankContext) -> None:
    """Run the backward of a penalty after the one of the output, which counted its parameter as unused, in each step.

    Observes `step<k>/spare.weight`: whether its gradient is "averaged", or else "named" by an error or warning of this
    step or an earlier one, or "not named". All ranks run it.
    """
    module = with_integer_weights(BodyAndHeads(), ctx.scenario.seed).to(ctx.device)
    model = ctx.wrap(module)
    weight, said = module.get_parameter("spare.weight"), False
    mean = 2.0 * UNIT * weight.detach() * (1 + ctx.world_size) / 2
    for index in range(NUM_STEPS):
        module.zero_grad(set_to_none=True)
        turn = rank_step(ctx, index)
        with ctx.catching("raised"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            turn.backward(turn.loss(turn.forward(model, turn.inputs(3, WIDTH))))
            turn.backward((1 + ctx.rank) * _decay(weight))
        raised = ctx.facts.pop("raised")
        said = said or any("spare.weight" in str(each) for each in (raised, *(one.message for one in caught)))
        is_averaged = weight.grad is not None and torch.equal(weight.grad, mean)
        found = "averaged" if is_averaged else "named" if said else "not named"
        ctx.observe(f"step{index}/spare.weight", found, must=AnyOf("averaged", "named"))
        if raised is not None:
            break
