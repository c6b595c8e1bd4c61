"""Program `returned_tensors`: hooks on what a forward returns, gradients that are kept of it, and None in place of one.

Autograd knows tensors by their places in the graph. A DDP that gives what forward returns another place takes the hooks
away from it, or the part of its gradient that comes by way of earlier uses.
"""

from typing import Any

import torch
from torch import Tensor, nn

from conformance.chapters.gradients.layer_below import WIDTH, total_loss, with_layer_below
from conformance.models.integers import RankStep
from conformance.programs import RankContext, observe_run, program, rank_step
from conformance.truth.steps import gradients

NUM_STEPS = 2
#: What the module or the loop does: the module hooks a view that it returns, returns a tensor whose gradient it keeps
#: and from which it has computed another output, or returns an attribute of a view; the loop hooks, or keeps the
#: gradient of, what it gave to the module and used before; the loss does not depend on the output, for autograd.
HANDLED = ("hooked_view", "kept_gradient", "attribute", "hooked_input", "kept_gradient_of_input", "no_gradient")


class Returning(nn.Module):
    """Returns two tensors; what it does with them besides goes by `handled`."""

    def __init__(self, handled: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self._handled = handled
        self.kept: Tensor | None = None  # no buffer: what the last forward has kept

    def forward(self, inputs: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
        made: Tensor = self.first(data) + inputs
        match self._handled:
            case "hooked_view":
                made = made.view(-1)
                made.register_hook(lambda gradient: gradient * 3)
            case "attribute":
                made = made.view(-1)
                made.scale = 3.0  # type: ignore[attr-defined]
            case "kept_gradient":
                made.retain_grad()
                self.kept = made
                return made, self.second(made)
            case "hooked_input" | "kept_gradient_of_input":
                return inputs, self.second(inputs) + made
        return made, self.second(inputs)


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


@program("returned_tensors", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def returned_tensors(ctx: RankContext) -> None:
    """Train a layer, and `Returning` on top of it; observe `step<k>/grad/<name>` and `step<k>/kept`. All ranks run it.

    Arguments: `handled`, of `HANDLED`; `beside`: the layer below has a wrapper of its own.
    """
    observe_run(ctx, lambda: _train(ctx))


def _train(ctx: RankContext) -> dict[str, Any]:
    handled = ctx.arguments["handled"]
    returning = Returning(handled)
    pair, below, above = with_layer_below(ctx, returning)
    facts: dict[str, Any] = {}
    for index in range(NUM_STEPS):
        pair.zero_grad(set_to_none=True)
        turn = rank_step(ctx, index)
        hidden = turn.forward(below, turn.inputs(WIDTH, WIDTH))
        before = hidden * 3
        outputs = turn.forward(above, hidden, turn.inputs(WIDTH, WIDTH, micro=1))
        turn.backward(_loss(turn, handled, hidden, before, outputs))
        kept = {"kept_gradient": returning.kept, "kept_gradient_of_input": hidden}.get(handled)
        facts |= gradients(f"step{index}", pair) | _of_kept(f"step{index}", kept)
    return facts


def _loss(turn: RankStep, handled: str, hidden: Tensor, before: Tensor, outputs: tuple[Tensor, Tensor]) -> Tensor:
    first, second = outputs
    match handled:
        case "hooked_input":
            hidden.register_hook(lambda gradient: gradient * 3)
        case "kept_gradient_of_input":
            hidden.retain_grad()
        case "attribute":
            first = first * first.scale  # type: ignore[attr-defined]
        case "no_gradient":
            first = second = _GivesNone.apply(first)
    return total_loss(turn, first, second, before)


def _of_kept(step: str, kept: Tensor | None) -> dict[str, Any]:
    return {} if kept is None else {f"{step}/kept": None if kept.grad is None else kept.grad.clone()}
