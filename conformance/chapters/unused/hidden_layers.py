"""Program `hidden_layers`: layers behind autograd functions that hide their graph, which only some ranks use.

A reentrant checkpoint runs its layers again within the backward, and begins a backward of their own. A search of the
outputs' graph finds neither layers nor parameters there, also where the rank does use them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.scenario import Scenario

WIDTH = 4


class Recomputed(torch.autograd.Function):
    """A checkpoint as projects write their own: the layer runs again in the backward, which calls `backward` itself."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, inputs: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(inputs)
        with torch.no_grad():
            output: Tensor = layer(inputs)
            return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None]:
        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(inputs)
        torch.autograd.backward(output, gradients[0])
        return None, inputs.grad


def _checkpointed(layer: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    hidden: Tensor = checkpoint(layer, inputs, use_reentrant=True)
    return hidden


def _recomputed(layer: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    hidden: Tensor = Recomputed.apply(layer, inputs)
    return hidden


HIDING: Mapping[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "checkpoint": _checkpointed,
    "own_function": _recomputed,
}


class HidingLayers(nn.Module):
    """A trunk, layers that it hides, a last one, and `spare`, which is never used: so a search seems worth its time."""

    def __init__(self, hiding: str, place: str) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.hide = HIDING[hiding]
        self.place = place

    def forward(self, inputs: Tensor, *, skip: bool = False) -> Tensor:
        if self.place == "all":
            return self._all(inputs, skip=skip)
        hidden: Tensor = self.trunk(inputs)
        if self.place == "end":
            hidden = self.last(hidden)
        if not skip:
            hidden = self.hide(self.first, hidden)
            hidden = self.hide(self._nested if self.place == "nested" else self.second, hidden)
        return hidden if self.place == "end" else self.last(hidden)

    def _nested(self, hidden: Tensor) -> Tensor:
        return self.hide(self.second, hidden)

    def _all(self, inputs: Tensor, *, skip: bool) -> Tensor:
        def run(inputs: Tensor) -> Tensor:
            hidden: Tensor = self.trunk(inputs)
            return hidden if skip else self.last(self.second(self.first(hidden)))

        return self.hide(run, inputs)


#: Where the hidden layers are: between two others, at the end, one within another, or all of them hidden.
PLACES = ("between", "end", "nested", "all")


def _step_of(scenario: Scenario) -> Callable[[Any, RankStep], None]:
    plan: Sequence[Any] = scenario.arguments["skips"]

    def step(model: Any, turn: RankStep) -> None:
        inputs = turn.inputs(3, WIDTH).requires_grad_()
        turn.backward(turn.loss(turn.forward(model, inputs, skip=turn.rank in plan[turn.step])))

    return step


def _module(scenario: Scenario) -> nn.Module:
    arguments = scenario.arguments
    return with_integer_weights(HidingLayers(arguments["hiding"], arguments["place"]), scenario.seed)


@program("hidden_layers", invariants=("leaves_no_trace",))
def hidden_layers(ctx: RankContext) -> None:
    """Train; in step k the ranks in `skips[k]` skip the hidden layers. All ranks run it.

    Observes `step<k>/grad/<name>`.
    """
    module = _module(ctx.scenario).to(ctx.device)
    num_steps = len(ctx.arguments["skips"])
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), _step_of(ctx.scenario), num_steps))
