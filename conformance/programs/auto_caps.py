"""Program `auto_caps`: the caps that ranks choose from measurements, and whether they choose the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from conformance.observation import Facts
from conformance.oracles.expected import Satisfies
from conformance.programs.program import program
from conformance.rank_context import RankContext
from conformance.scenario import Scenario


@program("auto_caps")
def auto_caps(ctx: RankContext) -> None:
    """Train for as many steps as the schedule has; rank 0 computes longer than the others in each backward.

    Observes `caps` (of this rank, in bytes), `caps_of_all` (in rank order) and `num_chosen`, on how many steps they
    were other than on the step before. All ranks run it.
    """
    module = ctx.build_model()
    model: Any = ctx.wrap(module)
    if ctx.rank == 0:
        for parameter in module.parameters():
            parameter.register_hook(_take_time)
    seen: list[list[int]] = [_caps(model)]
    for step, _ in enumerate(ctx.scenario.schedule):
        module.zero_grad()
        ctx.backward(ctx.loss(model, step), step)
        seen.append(_caps(model))
    mine = torch.tensor(seen[-1], device=ctx.device)
    everywhere = [torch.empty_like(mine) for _ in range(ctx.world_size)]
    dist.all_gather(everywhere, mine, group=ctx.process_group)
    ctx.observe("caps", seen[-1])
    ctx.observe("caps_of_all", [caps.tolist() for caps in everywhere])
    ctx.observe("num_chosen", sum(before != after for before, after in itertools.pairwise(seen)))


@auto_caps.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    positive = Satisfies("two positive numbers of bytes", lambda got: len(got) == 2 and min(got) > 0)
    alike = Satisfies("the same on all ranks", lambda got: len(got) == scenario.world_size and _all_equal(got))
    once = Satisfies("at most once", lambda got: got <= 1)
    return {rank: {"caps": positive, "caps_of_all": alike, "num_chosen": once} for rank in range(scenario.world_size)}


def _take_time(gradient: torch.Tensor) -> None:
    for _ in range(3):
        torch.mm(torch.ones(128, 128), torch.ones(128, 128))


def _caps(model: Any) -> list[int]:
    return [int(number) for number in str(model._get_ddp_logging_data()["auto_bucket_caps"]).split(",")]


def _all_equal(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)
