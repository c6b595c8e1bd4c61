"""The simulated device, which needs a C++ compiler: `sim` finds races, `sim-late` poisons data that is read too early.

A group of `sim` moves CPU tensors, too, like one of `cpu:gloo,cuda:nccl`; a group of `sim-alone` does not, like NCCL's.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import ProcessGroup, Store

from conformance.backends.backend import FOR_DDPS, Backend
from conformance.backends.gloo import GLOO
from conformance.backends.sim_device.build import build
from conformance.errors import BackendError, instance

#: The seed of the device's roundings; 0: as the CPU.
SEED_VARIABLE = "DDP_CONFORMANCE_SIM_SEED"

_NUM_DEVICES = 2


def _unavailable() -> str:
    try:
        build()  # outside of the ranks' deadlines
    except BackendError as error:
        return str(error)
    return ""


def _device(rank: int) -> str:
    return f"sim:{rank % _NUM_DEVICES}"


def _create(
    store: Store, rank: int, world_size: int, timeout: timedelta, *, late: bool = False, serves_hosts: bool = True
) -> ProcessGroup:
    from conformance.backends.sim_device.group import SimGroup
    from conformance.backends.sim_device.module import install

    device = install(late=late, seed=int(os.environ.get(SEED_VARIABLE, "1")))
    if not dist.is_initialized():  # a further group numbers its ranks anew
        device.set_device(rank % _NUM_DEVICES)
    inner = instance(GLOO.create(store, rank, world_size, timeout), GroupBackend)
    return SimGroup(inner, device, store, serves_hosts=serves_hosts)


def _noticed() -> tuple[str, ...]:
    from conformance.backends.sim_device.build import load
    from conformance.backends.sim_device.group import count_anew

    count_anew()
    device = load()
    device.settle()
    device.take_syncs()
    return tuple(f"race on the device: {race}" for race in device.take_races())


SIM = Backend(
    name="sim",
    device_type="sim",
    capabilities=FOR_DDPS - {"sparse"},
    max_world_size=lambda: None,
    unavailable=_unavailable,
    device=_device,
    create=_create,
    noticed=_noticed,
    simulated=True,
)
SIM_LATE = replace(SIM, name="sim-late", create=partial(_create, late=True))
SIM_ALONE = replace(SIM, name="sim-alone", create=partial(_create, serves_hosts=False))
