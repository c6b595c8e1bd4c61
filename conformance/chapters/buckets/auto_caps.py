"""Program `auto_caps`: whether ranks choose equal bucket caps from measurements, and whether the DDP uses them."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.bucket_traffic import Stack
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies, at_most

NUM_STEPS = 5  # caps are chosen after three
#: A prime, so that no even split of the whole ends where a vector ends.
_NUM_VECTORS = 23
#: Half a MiB each: by default a bucket of 1 MiB and one of 10.5, which travels when the backward is over. Smaller ones
#: would be on their way by then, and a machine whose measurements are not all noise chooses them.
_LENGTH = 2**17


@program("auto_caps")
def auto_caps(ctx: RankContext) -> None:
    """Train steps in which rank 0 computes longer than the others in each backward.

    Observes `step<k>/extremes/<i>`, the least and the largest element of the i-th gradient, `caps` (of this rank, in
    bytes), `caps_of_all` (in rank order) and `num_chosen`, on how many steps they were other than on the step before.
    All ranks run it.
    """
    stack = Stack([_LENGTH] * _NUM_VECTORS, ["float32"] * _NUM_VECTORS, range(_NUM_VECTORS))
    module: Any = with_integer_weights(stack, ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    if ctx.rank == 0:
        for parameter in module.parameters():
            parameter.register_hook(_take_time)
    seen: list[list[int]] = [_caps(model)]
    for index in range(NUM_STEPS):
        module.zero_grad(set_to_none=True)
        turn = rank_step(ctx, index)
        turn.backward(turn.loss(turn.forward(model, turn.inputs(3))))
        for place, vector in enumerate(module.vectors):
            ctx.observe(f"step{index}/extremes/{place}", torch.stack(vector.grad.aminmax()))
        seen.append(_caps(model))
    mine = torch.tensor(seen[-1], device=ctx.device)
    everywhere = [torch.empty_like(mine) for _ in range(ctx.world_size)]
    dist.all_gather(everywhere, mine, group=ctx.process_group)
    ctx.observe("caps", seen[-1])
    ctx.observe("caps_of_all", [caps.tolist() for caps in everywhere])
    ctx.observe("num_chosen", sum(before != after for before, after in itertools.pairwise(seen)))


@auto_caps.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    facts: dict[str, Any] = {
        "caps": Satisfies("two positive numbers of bytes", _are_two_positive),
        "caps_of_all": Satisfies("the same on all ranks", _are_alike, (scenario.world_size,)),
        "num_chosen": at_most(1, "change of caps"),
    }
    for index in range(NUM_STEPS):
        turns = [RankStep(rank, index) for rank in range(scenario.world_size)]
        # Of a vector's sum, which is added to each of three numbers as often as its place, counted from 1, says.
        mean = torch.stack([turn.loss(torch.ones(3)) for turn in turns]).mean()
        facts |= {f"step{index}/extremes/{place}": (mean * (place + 1)).expand(2) for place in range(_NUM_VECTORS)}
    return dict.fromkeys(range(scenario.world_size), facts)


def _are_two_positive(got: list[int]) -> bool:
    return len(got) == 2 and min(got) > 0


def _are_alike(got: list[Any], num_ranks: int) -> bool:
    return len(got) == num_ranks and all(value == got[0] for value in got)


def _take_time(gradient: Tensor) -> None:
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))


def _caps(model: Any) -> list[int]:
    return [int(number) for number in str(model._get_ddp_logging_data()["auto_bucket_caps"]).split(",")]
