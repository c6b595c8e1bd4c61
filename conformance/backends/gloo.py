"""gloo on the CPU: the backend that every machine has."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import Store

from conformance.backends.backend import CAPABILITIES, Backend

#: Loopback only: runs must not depend on a host name that resolves, nor be reachable from outside.
LOOPBACK = "127.0.0.1"


def _unavailable() -> str:
    return "" if dist.is_gloo_available() else "this torch was built without gloo"


def _create(store: Store, rank: int, world_size: int, timeout: timedelta) -> GroupBackend:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)


GLOO = Backend(
    name="gloo",
    device_type="cpu",
    capabilities=CAPABILITIES,
    max_world_size=lambda: None,
    unavailable=_unavailable,
    device=lambda rank: "cpu",
    create=_create,
)
