"""Program `zero_overlap`: torch's hook that steps a `ZeroRedundancyOptimizer` while gradients are being reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

from conformance.chapters.comm_hooks.hook_mending import any_backend
from conformance.models.catalogue import get_fixture
from conformance.models.optimizers import LEARNING_RATE
from conformance.observation import Facts
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.scenario import Scenario
from conformance.truth.device import replica_device, single_threaded
from conformance.truth.replicas import Replicas
from conformance.truth.steps import gradients

NUM_STEPS = 5
#: Steps in which torch's hook only learns what is in which bucket.
NUM_LEARNING = 2


@program("zero_overlap", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def zero_overlap(ctx: RankContext) -> None:
    """Train the model with SGD that is sharded over the ranks and steps inside the hook. All ranks run it.

    Argument `shard_buckets`, as for torch's hook. Observes `step<k>/loss`, gradients, and parameters after backward.
    """
    module = ctx.build_model()
    model: Any = ctx.wrap(module)
    zero: Any = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.SGD, process_group=ctx.process_group, overlap_with_ddp=True,
        lr=LEARNING_RATE,
    )  # fmt: skip
    with any_backend():
        hook = hook_with_zero_step(allreduce_hook, model, zero, shard_buckets=bool(ctx.arguments["shard_buckets"]))
    model.register_comm_hook(ctx.process_group, hook)
    for index in range(NUM_STEPS):
        module.zero_grad()
        loss = ctx.loss(model, index)
        ctx.backward(loss, index)
        ctx.observe(f"step{index}/loss", loss)
        ctx.observe_gradients(f"step{index}", module)
        ctx.observe_parameters(f"step{index}", module)


@zero_overlap.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    fixture = get_fixture(scenario.model)
    ranks = range(scenario.world_size)
    modules: list[nn.Module] = [fixture.build(scenario, replica_device()) for _ in ranks]
    optimizers = [torch.optim.SGD(module.parameters(), lr=LEARNING_RATE) for module in modules]
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    with single_threaded():
        world = Replicas(modules)
        for index in range(NUM_STEPS):
            for rank, module in enumerate(modules):
                module.zero_grad()
                loss = fixture.loss(module, scenario, rank=rank, step=index, micro=0, device=replica_device())
                loss.backward()
                facts[rank][f"step{index}/loss"] = loss.detach()
            world.average_gradients()
            for rank, module in enumerate(modules):
                facts[rank] |= gradients(f"step{index}", module)
                if index >= NUM_LEARNING:
                    optimizers[rank].step()
                for name, parameter in module.named_parameters():
                    facts[rank][f"step{index}/parameter/{name}"] = parameter.detach().clone()
    return facts
