"""A layer below the module that a program is about: what that module takes has a graph, and perhaps another wrapper."""

from typing import Any

from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext

WIDTH = 4


def with_layer_below(ctx: RankContext, top: nn.Module) -> tuple[nn.ModuleList, Any, Any]:
    """Return a layer and `top`, which have whole numbers for weights, and both as the program calls them.

    `top` is wrapped; the layer is, too, if the argument `beside` says so. All ranks must call it.
    """
    pair = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False), top])
    with_integer_weights(pair, ctx.scenario.seed).to(ctx.device)
    below = ctx.wrap(pair[0]) if ctx.arguments["beside"] else pair[0]
    return pair, below, ctx.wrap(top)


def total_loss(turn: RankStep, first: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of a loss of each tensor, with coefficients of its own."""
    return sum((turn.loss(one, micro=micro) for micro, one in enumerate(others, 1)), start=turn.loss(first))
