"""The gloo backend, on the CPU, which every machine has."""

import os
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import Store

from conformance.backends.backend import CAPABILITIES, Backend

#: The interface of ranks of one host: a run must not depend on a host name, nor accept connections from outside.
LOOPBACK = "lo"


def _create(store: Store, rank: int, world_size: int, timeout: timedelta, *, connected: bool = True) -> GroupBackend:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)  # the zygote sets it, for several hosts to theirs
    options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
    options._timeout = timeout
    if not connected:
        options.enable_reconfigure = True
    return dist.ProcessGroupGloo(store, rank, world_size, options)


GLOO = Backend(
    name="gloo",
    device_type="cpu",
    capabilities=CAPABILITIES - {"abort", "float8", "gather_single", "int16", "premul_sum", "streams"},
    max_world_size=lambda: None,
    unavailable=lambda: "" if dist.is_gloo_available() else "this torch was built without gloo",
    device=lambda rank: "cpu",
    create=_create,
    create_unconnected=partial(_create, connected=False),
)
