"""Program `initial_state`: what the constructor does with parameters and buffers that differ between ranks."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from conformance.models.buffer_values import BUFFERS, buffer_value
from conformance.models.catalogue import moved
from conformance.models.integers import integers
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.programs.truth import truth_of


class Stateful(nn.Module):
    """Parameters of several kinds, in the root and in a child, and a buffer of every kind; all differ by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.frozen = nn.Parameter(torch.empty(4), requires_grad=False)
        self.scalar = nn.Parameter(torch.empty(()))
        self.wide = nn.Parameter(torch.empty(2, dtype=torch.float64))
        self.child = nn.Linear(2, 3)
        self.tied = nn.Linear(2, 3, bias=False)
        self.tied.weight = self.child.weight
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(integers(*parameter.shape, key=("parameter", name, rank), largest=40))
        self.state = nn.Module()
        for name in BUFFERS:
            value = buffer_value(name, rank)
            if name == "turned":
                value = value.t().contiguous().t()
            owner = self if name in ("table", "count") else self.state
            owner.register_buffer(name, value, persistent=name != "hidden")


@program("initial_state", invariants=("same_collectives", "leaves_no_trace"))
def initial_state(ctx: RankContext) -> None:
    """Wrap a module that differs from rank to rank. Argument `ignored`: names that the DDP must ignore.

    Observes `start/parameter/<name>` and `start/buffer/<name>` after construction, and without `init_sync`
    `num_collectives`, how many collectives the constructor issued. All ranks run it.
    """
    module = moved(Stateful(ctx.rank), ctx.device)
    if ignored := ctx.arguments.get("ignored"):
        module._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is deprecated, and meant here
        ctx.wrap(module)
    if not ctx.scenario.options.get("init_sync", True):
        ctx.observe("num_collectives", len(ctx.collectives()), must=0)
    ctx.observe_parameters("start", module)
    ctx.observe_buffers("start", module)


initial_state.expects(truth_of)
