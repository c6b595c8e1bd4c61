"""Backends that packages register with torch by torch's own entry points, without a `Backend`."""

import importlib
import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from conformance.backends.backend import FOR_DDPS, Backend
from conformance.errors import BackendError

_numbers = itertools.count()


def registered_backend(name: str, target: str) -> Backend:
    """Return the backend that the function `target`, `module:attr`, registers with torch as `name`.

    Its capabilities are `FOR_DDPS`; a `Backend` may declare others. Raises `BackendError` if the function cannot be
    imported or raises, or registers no backend of that name.
    """
    module, _, function = target.partition(":")
    try:
        if name.upper() not in dist.Backend._plugins:
            getattr(importlib.import_module(module), function)()
        registered = dist.Backend._plugins[name.upper()]
        devices = dist.Backend.backend_capability[name.lower()]
    except (Exception, SystemExit) as error:
        raise BackendError(f"backend {name!r}: {target} registered none: {type(error).__name__}: {error}") from error
    on_cpu = "cpu" in devices
    device_type = "cpu" if on_cpu else devices[0]

    def create(store: c10d.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        if not (on_cpu or dist.is_initialized()):  # a further group numbers its ranks anew
            torch.get_device_module(device_type).set_device(rank)
        if not registered.extended_api:
            return registered.creator_fn(store, rank, world_size, timeout)
        options = c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, world_size
        options.timeout, options.group_id = timeout, f"conformance/{next(_numbers)}"
        options.global_ranks_in_group = list(range(world_size))
        return registered.creator_fn(options, None)

    return Backend(
        name=name,
        device_type=device_type,
        capabilities=FOR_DDPS - ({"streams"} if on_cpu else set()),
        max_world_size=lambda: None if on_cpu else int(torch.get_device_module(device_type).device_count()),
        unavailable=lambda: "",
        device=lambda rank: "cpu" if on_cpu else f"{device_type}:{rank}",
        create=create,
    )
