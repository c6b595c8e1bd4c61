"""Wrappers by name: any DDP that the suite knows, `fully_shard`, and `hsdp` on a mesh of two replicas."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from conformance.subjects.subject import get_subject, load

Wrap = Callable[[nn.Module], Any]


def wrapper(named: str | Wrap) -> Wrap:
    """Return what wraps a module on each rank; raises `SubjectError` for a name that nothing has.

    Names: `torch`, `ddp_impl`, `replicate` and the suite's other DDPs, `module:Class`, `fully_shard`, `hsdp`.
    """
    if not isinstance(named, str):
        return named
    return {"fully_shard": _fully_shard, "hsdp": _hsdp}.get(named) or load(get_subject(named))


def _fully_shard(module: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module)


def _hsdp(module: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(module.parameters()).device.type
    return fully_shard(
        module, mesh=init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    )
