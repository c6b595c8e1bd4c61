"""Program `zero_overlap`: torch's hook that steps a `ZeroRedundancyOptimizer` while gradients are being reduced."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

from conformance.chapters.comm_hooks.hook_mending import any_backend
from conformance.models.optimizers import LEARNING_RATE
from conformance.observation import Facts
from conformance.programs import RankContext, program, truth_of
from conformance.scenario import Scenario

NUM_STEPS = 5
#: Steps in which torch's hook only learns what is in which bucket.
NUM_LEARNING = 2


@program("zero_overlap", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def zero_overlap(ctx: RankContext) -> None:
    """Train the model with SGD that is sharded over the ranks and steps inside the hook. All ranks run it.

    Argument `shard_buckets`, as for torch's hook; without it SGD is not sharded, and steps after backward. Observes
    `step<k>/loss`, gradients, and parameters after the optimizer's step.
    """
    module = ctx.build_model()
    model: Any = ctx.wrap(module)
    overlaps = "shard_buckets" in ctx.arguments
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    if overlaps:
        _register(ctx, model, module)
    for index in range(NUM_STEPS):
        module.zero_grad()
        loss = ctx.loss(model, index)
        ctx.backward(loss, index)
        ctx.observe(f"step{index}/loss", loss)
        ctx.observe_gradients(f"step{index}", module)
        if not overlaps and index >= NUM_LEARNING:
            optimizer.step()
        ctx.observe_parameters(f"step{index}", module)


def _register(ctx: RankContext, model: Any, module: nn.Module) -> None:
    zero: Any = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.SGD, process_group=ctx.process_group, overlap_with_ddp=True,
        lr=LEARNING_RATE,
    )  # fmt: skip
    with any_backend():
        hook = hook_with_zero_step(allreduce_hook, model, zero, shard_buckets=bool(ctx.arguments["shard_buckets"]))
    model.register_comm_hook(ctx.process_group, hook)


@zero_overlap.expects
def _not_overlapped(scenario: Scenario) -> Mapping[int, Facts]:
    return truth_of(scenario.replace(arguments={}))
