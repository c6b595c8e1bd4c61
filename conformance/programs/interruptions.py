"""Programs in which an error occurs between construction and the end of backward."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.bomb import Bomb
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts, Raised
from conformance.programs import RankContext, observe_or_refused, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import Raises, Satisfies
from conformance.truth.steps import gradients


class _Minefield(nn.Module):
    """Two layers; if `armed`, backward raises between them, when the last layer's gradients are ready."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self.armed = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(Bomb.apply(hidden) if self.armed else hidden)


def _ordinary(model: nn.Module, turn: RankStep) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))


@program("exception_in_backward", invariants=("leaves_no_trace",))
def exception_in_backward(ctx: RankContext) -> None:
    """Train a step, raise in the middle of the second backward on every rank, and train a third step.

    Argument `recovery`: "none", or "update_process_group" to call that method before the third step. Observes
    `step0/grad/...`, `step1/raised`, and `outcome`: the third step's gradients, or the error that it raised.
    All ranks run it.
    """
    module: Any = with_integer_weights(_Minefield(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    _ordinary(model, rank_step(ctx, 0))
    ctx.observe_gradients("step0", module)
    module.zero_grad()
    module.armed = True
    with ctx.catching("step1/raised", must=Raises(("ArithmeticError",), ("bomb",))):
        _ordinary(model, rank_step(ctx, 1))
    module.armed = False
    module.zero_grad()
    refusal: Raises | None = Raises(("RuntimeError",), ("finish", "reduc"))
    if ctx.arguments["recovery"] == "update_process_group":
        model._update_process_group(ctx.process_group)
        refusal = None

    def train() -> dict[str, Any]:
        _ordinary(model, rank_step(ctx, 2))
        return gradients("step2", module)

    observe_or_refused(ctx, "outcome", train, refusal)


@program("replaced_parameter", invariants=("leaves_no_trace",))
def replaced_parameter(ctx: RankContext) -> None:
    """Replace a weight by a new Parameter after wrapping, on every rank, and train two more steps.

    Observes `answers`: the texts of the warnings and of the exception. All ranks run it.
    """
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(ctx.device)
    model = ctx.wrap(module)
    _ordinary(model, rank_step(ctx, 0))
    module[0].weight = nn.Parameter(torch.ones(3, 3, device=ctx.device))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ctx.catching("raised"):
            for index in (1, 2):
                module.zero_grad()
                _ordinary(model, rank_step(ctx, index))
    answers: list[Any] = [str(each.message) for each in caught]
    if (error := ctx.facts["raised"]) is not None:
        answers.append(error)
    ctx.observe("answers", answers)


def _names(answers: list[Any], name: str) -> bool:
    texts = [item.message if isinstance(item, Raised) else item for item in answers]
    return any(name in text for text in texts)


@replaced_parameter.expects
def _replaced_parameter(scenario: Scenario) -> Mapping[int, Facts]:
    named = Satisfies("a list with an exception or a warning that names '0.weight'", _names, ("0.weight",))
    return {rank: {"answers": named} for rank in range(scenario.world_size)}
