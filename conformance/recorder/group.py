"""Initialises torch.distributed so that the default group and every group made by `new_group` report to a recorder."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from conformance.backends.backend import Backend
from conformance.recorder.recorded_group import as_process_group
from conformance.recorder.recorder import Recorder

#: The name under which torch knows our creator. `dist.get_backend` answers with the real backend's name all the same.
REGISTERED_NAME = "conformance"


def init_process_group(
    backend: Backend,
    recorder: Recorder | None,
    *,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta = timedelta(minutes=5),
) -> dist.ProcessGroup:
    """Initialise the default group over `backend` and return it; all ranks must call it, once per process.

    Groups that `new_group` makes without naming a backend are of the same kind. With `recorder` None they are plain
    groups, built the same way, that nobody watches: to show that watching changes nothing.
    """
    first = True

    def create(prefix_store: Store, group_rank: int, group_size: int, group_timeout: timedelta) -> dist.ProcessGroup:
        nonlocal first
        label, first = "default" if first else "", False
        group = as_process_group(backend.create(prefix_store, group_rank, group_size, group_timeout), prefix_store)
        return group if recorder is None else recorder.wrap(group, label)

    dist.Backend.register_backend(REGISTERED_NAME, create, devices=[backend.device_type])
    _answer_with(backend.name)
    dist.init_process_group(REGISTERED_NAME, store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    return group


def _answer_with(name: str) -> None:
    """Let `dist.get_backend` say `name` for our groups: a DDP may rightly choose its way by the backend's name."""
    real = distributed_c10d.get_backend

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        answer = real(group)
        return name if answer == REGISTERED_NAME else answer

    get_backend.__doc__ = real.__doc__
    distributed_c10d.get_backend = get_backend  # type: ignore[assignment]
    dist.get_backend = get_backend  # type: ignore[assignment]
