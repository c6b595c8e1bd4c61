"""Program `initial_state`: what the constructor does with parameters and buffers that differ between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from conformance.models.buffer_values import BUFFERS, buffer_value
from conformance.models.catalogue import moved
from conformance.models.integers import integers
from conformance.observation import Facts
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.scenario import Scenario


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


def _options_say_buffers(options: Mapping[str, Any]) -> bool:
    if not options.get("init_sync", True):
        return False
    return "forward_sync_buffers" in options or bool(options.get("broadcast_buffers", True))


@program("initial_state", invariants=("same_collectives", "leaves_no_trace"))
def initial_state(ctx: RankContext) -> None:
    """Wrap a module that differs from rank to rank. Argument `ignored`: names that the DDP must ignore.

    Observes `start/parameter/<name>` and `start/buffer/<name>` after construction, and `num_collectives`, how many
    collectives the constructor issued. All ranks run it.
    """
    module = moved(Stateful(ctx.rank), ctx.device)
    if ignored := ctx.arguments.get("ignored"):
        module._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is deprecated, and meant here
        ctx.wrap(module)
    ctx.observe("num_collectives", len(ctx.collectives()))
    ctx.observe_parameters("start", module)
    ctx.observe_buffers("start", module)


@initial_state.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    modules = [Stateful(rank) for rank in range(scenario.world_size)]
    ignored = set(scenario.arguments.get("ignored", ()))
    init_sync = scenario.options.get("init_sync", True)
    buffers = _options_say_buffers(scenario.options)
    facts: dict[int, Facts] = {}
    for rank, module in enumerate(modules):
        mine: dict[str, Any] = {} if init_sync else {"num_collectives": 0}
        for kind, named, synchronised in (
            ("parameter", "named_parameters", init_sync),
            ("buffer", "named_buffers", buffers),
        ):
            of_root = dict(getattr(modules[0], named)())
            for name, value in getattr(module, named)():
                source = of_root[name] if synchronised and name not in ignored else value
                mine[f"start/{kind}/{name}"] = source.detach().clone()
        facts[rank] = mine
    return facts
