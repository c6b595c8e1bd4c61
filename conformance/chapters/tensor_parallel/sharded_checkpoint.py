"""Program `sharded_checkpoint`: saved from one layout of the mesh, loaded into another, and trained on."""

import copy
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from conformance.chapters.tensor_parallel.oracle import ShardedPlan, UnshardedRows
from conformance.chapters.tensor_parallel.sharded_training import grid, observe_whole, run_backward, sharded_module
from conformance.errors import instance, present
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded

_STEPS_BEFORE, _STEPS = 2, 4


@program("sharded_checkpoint", invariants=("same_collectives", "leaves_no_trace"))
def sharded_checkpoint(ctx: RankContext) -> None:
    """Train on `mesh`, save with `torch.distributed.checkpoint`, load on `load_mesh` and train on. All ranks run it.

    Observes `keys`, in which the wrapped module's state dict differs from the module's own; parameters as `saved` and
    as `loaded`; `unwritten`, elements of parameters in no chunk of the checkpoint; `written_twice`, bytes in files that
    are no entry of it; and the parameters in the `final` state, after training on.
    """
    before, after = _plans(ctx.scenario)
    folder = _shared_folder(ctx)
    try:
        with grid(ctx, before.mesh) as on:
            module = sharded_module(ctx, before, on)
            model, optimizer = ctx.wrap(module, device_mesh=on.dp), before.make_optimizer(module)
            _train(ctx, before, model, optimizer, range(_STEPS_BEFORE))
            state = model.state_dict()
            ctx.observe("keys", sorted({f"module.{name}" for name in module.state_dict()} ^ set(state)))
            observe_whole(ctx, "saved", module)
            save(_everything(model, module, optimizer), checkpoint_id=folder)
        _observe_files(ctx, folder, module)
        with grid(ctx, after.mesh) as on:
            module = sharded_module(ctx, after, on, variant=1)
            model, optimizer = ctx.wrap(module, device_mesh=on.dp), after.make_optimizer(module)
            wanted = _everything(model, module, optimizer)
            load(wanted, checkpoint_id=folder)
            model.load_state_dict(wanted["model"])
            set_optimizer_state_dict(module, optimizer, wanted["optimizer"])
            observe_whole(ctx, "loaded", module)
            _train(ctx, after, model, optimizer, range(_STEPS_BEFORE, _STEPS))
            observe_whole(ctx, "final", module)
    finally:
        if ctx.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _plans(scenario: Scenario) -> tuple[ShardedPlan, ShardedPlan]:
    arguments = dict(scenario.arguments)
    load_mesh = arguments.pop("load_mesh")
    return tuple(
        ShardedPlan.of(scenario.replace(arguments={**arguments, "mesh": mesh}))
        for mesh in (arguments["mesh"], load_mesh)
    )  # type: ignore[return-value]


def _shared_folder(ctx: RankContext) -> str:
    name = [tempfile.mkdtemp(prefix="ddp-conformance-checkpoint-") if ctx.rank == 0 else None]
    dist.broadcast_object_list(name, group=ctx.process_group)
    return present(name[0])


def _everything(model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}


def _train(ctx: RankContext, plan: ShardedPlan, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        run_backward(ctx, plan, model, step)
        with ctx.phase("optimizer", step):
            optimizer.step()


def _observe_files(ctx: RankContext, folder: str, module: nn.Module) -> None:
    dist.barrier(group=ctx.process_group)
    metadata = FileSystemReader(folder).read_metadata()
    unwritten = {}
    for name, parameter in module.named_parameters():
        entry = instance(metadata.state_dict_metadata[f"model.module.{name}"], TensorStorageMetadata)
        missing = parameter.numel() - sum(chunk.sizes.numel() for chunk in entry.chunks)
        if missing:
            unwritten[name] = missing
    entries = sum(place.length for place in present(metadata.storage_data).values())
    ctx.observe("unwritten", unwritten)
    ctx.observe("written_twice", sum(path.stat().st_size for path in Path(folder).glob("*.distcp")) - entries)


@sharded_checkpoint.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    """Return the unsharded training, with the rows of the first mesh and then with those of the second."""
    before, after = _plans(scenario)
    with single_threaded():
        first, second = UnshardedRows(before, scenario.options), UnshardedRows(after, scenario.options)
        for step in range(_STEPS_BEFORE):
            first.step(step)
        saved = first.parameters(0)
        for module, optimizer in zip(second.modules, second.optimizers, strict=True):
            module.load_state_dict(first.modules[0].state_dict())
            optimizer.load_state_dict(copy.deepcopy(first.optimizers[0].state_dict()))  # it would share tensors
        for step in range(_STEPS_BEFORE, _STEPS):
            second.step(step)
    facts: dict[str, Any] = {"keys": [], "unwritten": {}, "written_twice": 0}
    for moment, values in (("saved", saved), ("loaded", saved), ("final", second.parameters(0))):
        facts |= {f"{moment}/parameter/{name}": value for name, value in values.items()}
    return {rank: dict(facts) for rank in range(scenario.world_size)}
