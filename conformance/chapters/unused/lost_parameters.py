"""Program `lost_parameters`: a module that loses parameters after wrapping: deleted, replaced by nothing, tied."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps

WIDTH = 4


class Layers(nn.Module):
    """Three layers, of which the last is left out where it is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head: nn.Module = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.second(self.first(rows))
        head = getattr(self, "head", None)
        result: Tensor = hidden if head is None else head(hidden)
        return result


def _delete_layer(module: Layers) -> None:
    del module.head


def _replace_layer(module: Layers) -> None:
    module.head = nn.Identity()


def _delete_bias(module: Layers) -> None:
    module.second.register_parameter("bias", None)


def _tie(module: Layers) -> None:
    module.second.weight = module.first.weight


LOSSES: Mapping[str, Callable[[Layers], None]] = {
    "deleted_layer": _delete_layer,
    "replaced_layer": _replace_layer,
    "deleted_bias": _delete_bias,
    "tied": _tie,
}


@program("lost_parameters", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def lost_parameters(ctx: RankContext) -> None:
    """Train a step, take away what argument `loss` names, and train two more. All ranks run it.

    Observes `step<k>/grad/<name>` of the parameters that are left.
    """
    module = with_integer_weights(Layers(), ctx.scenario.seed).to(ctx.device)
    take_away = LOSSES[ctx.arguments["loss"]]

    def step(model: Any, turn: RankStep) -> None:
        if turn.step == 1:
            take_away(module)
        turn.backward(turn.loss(turn.forward(model, turn.inputs(3, WIDTH))))

    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, 3))
