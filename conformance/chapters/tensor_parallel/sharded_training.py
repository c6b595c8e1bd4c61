"""Program `sharded_training`: data parallelism over the rows of a mesh whose rows share one module's parameters."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from conformance.chapters.tensor_parallel.oracle import ShardedPlan, losses_of_unsharded, simulate_unsharded
from conformance.observation import Collective
from conformance.programs import RankContext, program
from conformance.programs.join_context import joining

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "all_reduce": default_hooks.allreduce_hook}

#: torch remembers how DTensor operations are sharded, with the mesh, and takes meshes of one shape and of the same
#: names for the same: a later one would be given the groups of one that is gone. So no two have the same names.
_serial = itertools.count()


class Grid:
    """A mesh of all ranks and its two dimensions that matter."""

    def __init__(self, ctx: RankContext, shape: tuple[int, ...]) -> None:
        """Make the groups of all dimensions; all ranks must call it."""
        number = next(_serial)
        names = tuple(f"{name}{number}" for name in ("pp", "dp", "tp")[-len(shape) :])
        self.mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=names)
        self.dp: DeviceMesh = self.mesh[names[-2]]
        self.tp: DeviceMesh = self.mesh[names[-1]]
        self._world = ctx.process_group

    def close(self) -> None:
        """Destroy the groups that were made; all ranks must call it."""
        dist.barrier(group=self._world)
        groups = {id(group): group for group in self.mesh.get_all_groups()}
        for group in groups.values():
            if group is not self._world:
                dist.destroy_process_group(group)
        # torch's memory of DTensor operations keeps the mesh, which would keep its groups, whose threads never rest.
        getattr(self.mesh, "_pg_registry", {}).clear()


@contextlib.contextmanager
def grid(ctx: RankContext, shape: tuple[int, ...]) -> Iterator[Grid]:
    """Provide a mesh for as long as the block runs; a block that raises leaves it to the end of the process."""
    made = Grid(ctx, shape)
    yield made
    made.close()


def group_label(ctx: RankContext, dimension: DeviceMesh) -> str:
    """Return the name that the group has in the history, of a 1-D mesh."""
    group = dimension.get_group()
    return "default" if group is ctx.process_group else f"group {group.group_name}"


def of_group(ctx: RankContext, dimension: DeviceMesh) -> list[Collective]:
    """Return what this rank has issued so far in the group of a 1-D mesh."""
    label = group_label(ctx, dimension)
    return [collective for collective in ctx.collectives() if collective.group == label]


def whole(tensor: Tensor | None) -> Tensor | None:
    """Return a DTensor put together from its shards, anything else as it is; all ranks of its mesh must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def observe_whole(ctx: RankContext, prefix: str, module: nn.Module) -> None:
    """Observe all parameters and buffers of `module`, each as a whole."""
    for name, parameter in module.named_parameters():
        ctx.observe(f"{prefix}/parameter/{name}", whole(parameter))
    for name, buffer in module.named_buffers():
        ctx.observe(f"{prefix}/buffer/{name}", whole(buffer))


def sharded_module(ctx: RankContext, plan: ShardedPlan, on: Grid, variant: int = 0) -> nn.Module:
    """Return the plan's model spread over a row of the mesh; all ranks of the row must call it."""
    model = plan.sharded_model
    return model.make_exact(model.spread(model.build(variant).to(ctx.device), on.tp))


@program("sharded_training", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def sharded_training(ctx: RankContext) -> None:
    """Train by a `ShardedPlan`. All ranks run it.

    Observes for each step that the rank's row has data for `loss<m>`, `grad/<name>` (put together from shards), `norm`
    before clipping, and `rows_under_no_sync`, how many collectives a backward under `no_sync` brought about over the
    rows; in the end all parameters and buffers.
    """
    plan = ShardedPlan.of(ctx.scenario)
    with grid(ctx, plan.mesh) as on:
        row = plan.row_of(ctx.rank)
        module = sharded_module(ctx, plan, on, variant=row if plan.variants else 0)
        model: Any = ctx.wrap(module, device_mesh=on.dp)
        if plan.hook:
            model.register_comm_hook(on.dp.get_group(), _HOOKS[plan.hook])
        optimizer = plan.make_optimizer(module)
        join = model.join(divide_by_initial_world_size=plan.divide_by_initial_world_size) if plan.num_inputs else None
        with joining(ctx, join) if join else contextlib.nullcontext():
            for step in range(plan.num_steps):
                if plan.is_active(row, step):
                    _step(ctx, plan, on, model, module, optimizer, step)
        observe_whole(ctx, "final", module)


def _step(
    ctx: RankContext, plan: ShardedPlan, on: Grid, model: Any, module: nn.Module, optimizer: Any, step: int
) -> None:
    if plan.zero_grad != "keep":
        optimizer.zero_grad(set_to_none=plan.zero_grad == "none")
    if plan.accumulate:
        with ctx.no_sync(model):
            for micro in range(plan.accumulate):
                run_backward(ctx, plan, model, step, micro)
        local = [one for one in of_group(ctx, on.dp) if one.step == step and one.phase == "backward"]
        ctx.observe(f"step{step}/rows_under_no_sync", len(local))
    run_backward(ctx, plan, model, step, plan.accumulate)
    for name, parameter in module.named_parameters():
        ctx.observe(f"step{step}/grad/{name}", whole(parameter.grad))
    with ctx.phase("optimizer", step):
        if plan.clip:
            norm = whole(nn.utils.clip_grad_norm_(module.parameters(), plan.clip))
            ctx.observe(f"step{step}/norm", norm)
        optimizer.step()


def run_backward(ctx: RankContext, plan: ShardedPlan, model: Any, step: int, micro: int = 0) -> None:
    """Run forward and backward on the row's batch and observe the loss."""
    row = plan.row_of(ctx.rank)
    with ctx.phase("forward", step):
        loss = plan.sharded_model.loss(model, row, step, micro, **plan.keywords(row, step))
    ctx.backward(loss, step)
    ctx.observe(f"step{step}/loss{micro}", loss)


sharded_training.expects(simulate_unsharded)


@program("localized_training", invariants=("same_collectives", "nothing_in_flight"))
def localized_training(ctx: RankContext) -> None:
    """Train by a `ShardedPlan` a module that torch has prepared: the DDP is given local shards in place of DTensors.

    torch's preparation makes DTensors of the shards for each forward, and leaves plain attributes behind. All ranks run
    it. Observes the losses, which after the first step show whether gradients were averaged.
    """
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    plan = ShardedPlan.of(ctx.scenario)
    with grid(ctx, plan.mesh) as on:
        module = sharded_module(ctx, plan, on)
        _pre_dp_module_transform(module)
        optimizer = plan.make_optimizer(plan.sharded_model.make_exact(module))
        model: Any = ctx.wrap(module, process_group=on.dp.get_group())
        for step in range(plan.num_steps):
            optimizer.zero_grad()
            run_backward(ctx, plan, model, step)
            with ctx.phase("optimizer", step):
                optimizer.step()


localized_training.expects(losses_of_unsharded)
