"""Program `uneven_training`: ranks with different numbers of inputs train inside join contexts."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from conformance.chapters.join.plan import UnevenPlan
from conformance.models.optimizers import LEARNING_RATE
from conformance.programs import RankContext, program
from conformance.programs.agreement import same_bits_everywhere
from conformance.programs.join_context import joining


@program("uneven_training", invariants=("same_collectives", "silent_no_sync", "leaves_no_trace"))
def uneven_training(ctx: RankContext) -> None:
    """Train by an `UnevenPlan`. All ranks run it, each with its own number of inputs.

    Argument `optimizer`: "sgd" or "zero" (torch's `ZeroRedundancyOptimizer`, which joins as well).

    Observes for each step `loss`, `grad/<name>` and, if the plan says so, `evaluation`; gradients and parameters after
    every context, parameters at the end; and `same_everywhere/<buffer>`. All ranks run it.
    """
    plan = UnevenPlan.of(ctx.scenario)
    module = ctx.build_model()
    model: Any = ctx.wrap(module)
    if ctx.arguments.get("hook"):
        model.register_comm_hook(ctx.process_group, _doubled_mean)
    shards = ctx.arguments.get("optimizer") == "zero"
    optimizer: Any = _zero(ctx, module) if shards else _sgd(module)
    joinables = [model, optimizer] if shards else [model]
    for context in range(plan.contexts):
        with joining(ctx, _join(ctx, joinables)):
            for index in range(plan.num_inputs[ctx.rank]):
                number = plan.step_number(context, index)
                _step(ctx, model, module, optimizer, number, synchronised=plan.is_synchronised(index))
        ctx.observe_gradients(f"context{context}", module)
        optimizer.zero_grad()
        ctx.observe_parameters(f"context{context}", module)
    for index in range(plan.even_steps):
        _step(ctx, model, module, optimizer, plan.step_number(plan.contexts, index), synchronised=True)
    ctx.observe_parameters("final", module)
    for name, buffer in module.named_buffers():
        ctx.observe(f"same_everywhere/{name}", same_bits_everywhere(ctx, [buffer]), must=True)


def _doubled_mean(group, bucket):  # type: ignore[no-untyped-def]
    """Return the future of twice the mean: a comm hook whose work shows in the gradients."""
    buffer = bucket.buffer().mul_(2).div_(group.size())
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda _: buffer)


def _sgd(module: nn.Module) -> optim.Optimizer:
    """Return SGD without state, so that ranks that miss steps lack nothing but parameter updates."""
    return optim.SGD(module.parameters(), lr=LEARNING_RATE)


def _zero(ctx: RankContext, module: nn.Module) -> optim.Optimizer:
    return ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=optim.SGD, process_group=ctx.process_group, lr=LEARNING_RATE
    )


def _join(ctx: RankContext, joinables: list[Any]) -> Any:
    """Return the context: what `join()` of the only joinable gives, or torch's `Join` over several."""
    by_initial = UnevenPlan.of(ctx.scenario).divide_by_initial_world_size
    if len(joinables) == 1:
        return joinables[0].join(divide_by_initial_world_size=by_initial)
    return Join(joinables, divide_by_initial_world_size=by_initial)


def _step(ctx: RankContext, model: Any, module: nn.Module, optimizer: Any, number: int, *, synchronised: bool) -> None:
    if ctx.arguments.get("evaluate"):
        model.eval()
        with torch.no_grad():
            ctx.observe(f"step{number}/evaluation", ctx.loss(model, number, micro=1))
        model.train()
    with contextlib.nullcontext() if synchronised else ctx.no_sync(model):
        loss = ctx.loss(model, number)
        ctx.backward(loss, number)
    ctx.observe(f"step{number}/loss", loss)
    ctx.observe_gradients(f"step{number}", module)
    if synchronised:
        with ctx.phase("optimizer", number):
            optimizer.step()
        optimizer.zero_grad()
