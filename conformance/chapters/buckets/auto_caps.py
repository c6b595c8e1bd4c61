"""Program `auto_caps`: whether ranks choose equal bucket caps from measurements, and whether the DDP uses them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs.bucket_traffic import Stack
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.programs.written_steps import observe_run, run_steps
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies
from conformance.truth.steps import simulate_steps

NUM_STEPS = 5  # caps are chosen after three
#: A prime, so that no even split of the whole ends where a vector ends.
_NUM_VECTORS = 23
#: Half a MiB each: by default a bucket of 1 MiB and one of 10.5, which travels when the backward is over. Smaller ones
#: would be on their way by then, and a machine whose measurements are not all noise chooses them.
_LENGTH = 2**17


def _build(scenario: Scenario, length: int) -> nn.Module:
    stack = Stack([length] * _NUM_VECTORS, ["float32"] * _NUM_VECTORS, range(_NUM_VECTORS))
    return with_integer_weights(stack, scenario.seed)


def _step(model: Any, turn: RankStep) -> Mapping[str, Any]:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(3))))
    vectors = getattr(model, "module", model).vectors
    return {f"extremes/{place}": torch.stack(vector.grad.aminmax()) for place, vector in enumerate(vectors)}


@program("auto_caps")
def auto_caps(ctx: RankContext) -> None:
    """Train steps in which rank 0 computes longer than the others in each backward.

    Observes `step<k>/extremes/<i>`, the least and the largest element of the i-th gradient, `caps` (of this rank, in
    bytes), `caps_of_all` (in rank order) and `num_chosen`, on how many steps they were other than on the step before.
    All ranks run it.
    """
    module: Any = _build(ctx.scenario, _LENGTH).to(ctx.device)
    model: Any = ctx.wrap(module)
    if ctx.rank == 0:
        for parameter in module.parameters():
            parameter.register_hook(_take_time)
    seen: list[list[int]] = [_caps(model)]

    def step(model: Any, turn: RankStep) -> Mapping[str, Any]:
        facts = _step(model, turn)
        seen.append(_caps(model))
        return facts

    def run() -> dict[str, Any]:
        facts = run_steps(ctx, module, model, step, NUM_STEPS)
        return {name: value for name, value in facts.items() if "/extremes/" in name}

    observe_run(ctx, run)
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
    # All elements of a vector have the same gradient, however many they are.
    truth = simulate_steps([_build(scenario, 1) for _ in range(scenario.world_size)], _step, NUM_STEPS)
    return {
        rank: {**_means(mine), "caps": positive, "caps_of_all": alike, "num_chosen": once}
        for rank, mine in truth.items()
    }


def _means(facts: Facts) -> dict[str, Any]:
    """Return the facts of `_step` for the averaged gradients; the truth ran `_step` on local ones."""
    return {
        f"step{index}/extremes/{place}": facts[f"step{index}/grad/vectors.{place}"].expand(2)
        for index in range(NUM_STEPS)
        for place in range(_NUM_VECTORS)
    }


def _take_time(gradient: Tensor) -> None:
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))


def _caps(model: Any) -> list[int]:
    return [int(number) for number in str(model._get_ddp_logging_data()["auto_bucket_caps"]).split(",")]


def _all_equal(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)
