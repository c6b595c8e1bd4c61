"""Program `outside_forward`: losses that use parameters outside of forward's outputs.

The gradient of such a parameter may come before autograd reaches an output of forward, beside it, or although the
search for unused parameters did not find the parameter. A first step tells nothing: buckets are planned anew after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from conformance.models.integers import UNIT, RankStep, with_integer_weights
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.programs.truth import truth_of
from conformance.programs.written_steps import observe_run, run_steps
from conformance.truth.expected import Raises

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
        """Return rows of WIDTH; with `returns`, the parameter of that name beside them."""
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
    """Train steps in the way that argument `use` names; a DDP may refuse. All ranks run it.

    Observes `outcome`: `step<k>/grad/<name>` of all steps, or the exception that was raised.
    """
    module = with_integer_weights(BodyAndHeads(), ctx.scenario.seed).to(ctx.device)
    step = USES[ctx.arguments["use"]]
    refusal = Raises(("RuntimeError",))
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS), refusal=refusal)


outside_forward.expects(truth_of)
