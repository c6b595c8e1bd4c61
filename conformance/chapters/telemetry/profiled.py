"""Which parts of a step a profiler shows, under the names that torch's DDP gives them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from conformance.chapters.telemetry.debug_levels import Net
from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario

_FORWARD, _SEARCH, _COPY_IN, _COPY_OUT = "forward", "search for unused parameters", "copies in", "copies out"
#: What torch's DDP calls the parts of a step. Whether gradients are divided on their way into a bucket is its choice.
_PARTS = {
    "DistributedDataParallel.forward": _FORWARD,
    "torch.distributed.ddp.reducer::search_unused_parameters": _SEARCH,
    "torch::distributed::reducer::mul_out": _COPY_IN,
    "torch::distributed::reducer::copy_": _COPY_IN,
    "torch.distributed.ddp.reducer::copy_bucket_to_grad": _COPY_OUT,
}
#: Columns of the wide net: weights of 192 KiB, which a DDP may put into a bucket one by one.
_WIDE = 16_384


@program("profiled_step", invariants=("same_collectives", "leaves_no_trace"))
def profiled_step(ctx: RankContext) -> None:
    """Profile the third of three steps; observe `events`, which of the parts above the profiler shows.

    Every step's gradients are new, so they are copied into buckets. With argument `hooked` a comm hook sums and divides
    them, with `wide` the gradients are large. All ranks run it.
    """
    net = Net(_WIDE) if ctx.arguments.get("wide") else Net()
    model: Any = ctx.wrap(with_integer_weights(net, ctx.scenario.seed).to(ctx.device))
    if ctx.arguments.get("hooked"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)

    def step(index: int) -> None:
        turn = rank_step(ctx, index)
        turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3), True)))
        model.zero_grad(set_to_none=True)

    step(0)
    step(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(2)
    ctx.observe("events", sorted({_PARTS[event.name] for event in profiler.events() if event.name in _PARTS}))


@profiled_step.expects
def _profiled_step(scenario: Scenario) -> Mapping[int, Facts]:
    shown = {_FORWARD, _COPY_IN}
    if scenario.options.get("find_unused_parameters"):
        shown.add(_SEARCH)
    if not scenario.options.get("gradient_as_bucket_view"):
        shown.add(_COPY_OUT)
    return {rank: {"events": sorted(shown)} for rank in range(scenario.world_size)}
