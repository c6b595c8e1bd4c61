"""Program `distributed_checkpoint`: what torch.distributed.checkpoint makes of a wrapper, and another wrapper of it."""

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.models.integers import integers, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.scenario import Scenario

#: What a checkpoint is saved from and loaded into, for each argument `way`.
WAYS: Mapping[str, tuple[str, str]] = {
    "same": ("subject", "subject"),
    "to_torch": ("subject", "torch"),
    "from_torch": ("torch", "subject"),
    "to_bare": ("subject", "bare"),
    "from_bare": ("bare", "subject"),
}


def _build(seed: int) -> nn.Module:
    return with_integer_weights(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), seed)


def _wrap(ctx: RankContext, kind: str, module: nn.Module) -> nn.Module:
    if kind == "bare":
        return module
    return ctx.wrap(module) if kind == "subject" else ctx.wrap_in("torch", module, process_group=ctx.process_group)


def _stepped(module: nn.Module, seed: int) -> torch.optim.Optimizer:
    """Return an optimizer that has made a step with gradients that need no DDP, so that it has momentum."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    for place, parameter in enumerate(module.parameters()):
        parameter.grad = integers(*parameter.shape, key=("gradient", place, seed)).to(parameter.device)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _momenta(module: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    return {f"momentum/{n}": optimizer.state[p]["momentum_buffer"] for n, p in module.named_parameters()}


@program("distributed_checkpoint", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def distributed_checkpoint(ctx: RankContext) -> None:
    """Save module and optimizer with torch.distributed.checkpoint and load them, wrapped as argument `way` says.

    Observes the keys of both state dicts, and parameters, buffers and momenta after loading. All ranks run it.
    """
    source, target = WAYS[ctx.arguments["way"]]
    seed = ctx.scenario.seed
    module, fresh = _build(seed).to(ctx.device), _build(seed + 1).to(ctx.device)
    model, receiver = _wrap(ctx, source, module), _wrap(ctx, target, fresh)
    optimizer, receiving = _stepped(model, seed), _stepped(receiver, seed + 1)
    saved, optimizer_saved = get_state_dict(model, optimizer)
    ctx.observe("keys", sorted(saved))
    ctx.observe("optimizer_keys", sorted(optimizer_saved["state"]))
    loaded, optimizer_loaded = get_state_dict(receiver, receiving)
    # Each rank for itself: the groups under test need not be able to pass objects around.
    with tempfile.TemporaryDirectory() as folder:
        save({"model": saved, "optimizer": optimizer_saved}, checkpoint_id=folder, no_dist=True)
        load({"model": loaded, "optimizer": optimizer_loaded}, checkpoint_id=folder, no_dist=True)
    set_state_dict(receiver, receiving, model_state_dict=loaded, optim_state_dict=optimizer_loaded)
    for name, tensor in {**fresh.state_dict(), **_momenta(fresh, receiving)}.items():
        ctx.observe(f"loaded/{name}", tensor)


@distributed_checkpoint.expects
def _checkpointed(scenario: Scenario) -> Mapping[int, Facts]:
    module = _build(scenario.seed)
    optimizer = _stepped(module, scenario.seed)
    facts: dict[str, Any] = {
        "keys": sorted(module.state_dict()),
        "optimizer_keys": sorted(name for name, _ in module.named_parameters()),
    }
    facts |= {f"loaded/{name}": t for name, t in {**module.state_dict(), **_momenta(module, optimizer)}.items()}
    return dict.fromkeys(range(scenario.world_size), facts)


@program("recognised_wrapper", invariants=("leaves_no_trace",))
def recognised_wrapper(ctx: RankContext) -> None:
    """Ask as libraries do whether a wrapper, a copy of it and its subclass are a DDP. All ranks run it."""
    module = _build(ctx.scenario.seed).to(ctx.device)
    model = ctx.wrap(module)
    ctx.observe("isinstance", isinstance(model, TorchDDP), must=True)
    ctx.observe("issubclass", issubclass(type("Derived", (type(model),), {}), TorchDDP), must=True)
    ctx.observe("a_module_is_none", not isinstance(module, TorchDDP), must=True)
    # Tools that use torch's class find it as torch made it, whatever has been imported.
    ctx.observe("torchs_class_is_torchs", TorchDDP.__module__ == "torch.nn.parallel.distributed", must=True)
    ctx.observe("torchs_active_module", TorchDDP._get_active_ddp_module(), must=None)
