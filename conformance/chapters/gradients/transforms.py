"""Program `transforms`: a wrapper is called within a function transform (`torch.func`), between steps of a training."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.composed.transforms import FORWARD_MODE
from conformance.models.integers import RankStep, integers, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps

WIDTH = 3
_NUM_STEPS = 4

#: What is made of the wrapper, as a function of rows.
TRANSFORMS: Mapping[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda model, rows: torch.func.grad(lambda each: model(each).sum())(rows),
    "jvp": lambda model, rows: torch.func.jvp(model, (rows,), (rows,))[1],
    "vmap": lambda model, rows: torch.func.vmap(model)(rows),
    "jacrev": lambda model, rows: torch.func.jacrev(model)(rows),
    "hessian": lambda model, rows: torch.func.hessian(lambda each: model(each).sum())(rows),
    "of_stand_ins": lambda model, rows: torch.func.grad(
        lambda parameters: torch.func.functional_call(model, parameters, (rows,)).sum()
    )({name: parameter.detach() for name, parameter in model.named_parameters()}),
}


class Curved(nn.Module):
    """Two layers, with the square of the rows between them, and a buffer if it `has_buffer`.

    Returns its first weight, too, if it `returns_parameter`, and what it got while it `is_idle`.
    """

    def __init__(self, key: tuple[object, ...], *, has_buffer: bool, returns_parameter: bool) -> None:
        super().__init__()
        self.returns_parameter, self.is_idle = returns_parameter, False
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        if has_buffer:
            self.register_buffer("shift", integers(WIDTH, key=key))

    def forward(self, rows: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.is_idle:
            return rows
        hidden = self.first(rows).square()
        output: Tensor = self.last(hidden + self.shift if hasattr(self, "shift") else hidden)
        return (output, self.first.weight) if self.returns_parameter else output


def _rows(given: Any) -> Any:
    return given[0] if isinstance(given, tuple) else given


@program("transforms", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"), preload=FORWARD_MODE)
def transforms(ctx: RankContext) -> None:
    """Train some steps, and call the wrapper within a transform in step `at`.

    Arguments: `transform`, one of `TRANSFORMS`; `at`; `trains`, what the loss of that step is made of: what the
    transform gives, "alone" or "beside" an ordinary forward (if it is not given, the step has no backward); `buffer`,
    whether the module has one, in which ranks differ before each forward; `returns_parameter`, whether the module
    returns one besides; `idle`, the rank whose transformed forward uses no parameter; `ranks`, those that transform
    (all, if it is not given), while the others run a forward. Observes what the transform gives, and the gradients of
    every step. All ranks run it.
    """
    has_buffer, returns_parameter = (bool(ctx.arguments.get(name)) for name in ("buffer", "returns_parameter"))
    module = Curved((ctx.rank,), has_buffer=has_buffer, returns_parameter=returns_parameter)
    with_integer_weights(module, ctx.scenario.seed).to(ctx.device)
    transform = TRANSFORMS[ctx.arguments["transform"]]
    transforming = ctx.rank in ctx.arguments.get("ranks", (ctx.rank,))

    def step(model: Any, turn: RankStep) -> dict[str, Any]:
        if has_buffer:
            with torch.no_grad():
                module.get_buffer("shift").add_(ctx.rank)
        if turn.step != ctx.arguments["at"]:
            turn.backward(turn.loss(_rows(turn.forward(model, turn.inputs(2, WIDTH)))))
            return {}
        rows = turn.inputs(2, WIDTH)
        transformed = (lambda given: _rows(model(given))) if returns_parameter else model
        call: Any = partial(transform, transformed) if transforming else model
        module.is_idle = ctx.arguments.get("idle") == ctx.rank
        given = turn.forward(call, rows)
        module.is_idle = False
        if trains := ctx.arguments.get("trains"):
            loss = turn.loss(given, micro=1)
            turn.backward(loss if trains == "alone" else loss + turn.loss(turn.forward(model, rows)))
        return {"given": given}

    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, _NUM_STEPS))
