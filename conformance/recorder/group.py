"""Initialises torch.distributed so that the default group and every `new_group` report to a recorder."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from conformance.backends.backend import Backend
from conformance.errors import BackendError, present
from conformance.recorder.recorded_group import as_process_group
from conformance.recorder.recorder import Recorder

#: The harness's backend in torch's registry; `dist.get_backend` still returns the real name.
REGISTERED_NAME = "conformance"
_numbers = itertools.count()


@dataclass
class _Installation:
    backend: Backend
    recorder: Recorder | None
    made_default: bool = False

    def create(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
        with nullcontext() if self.recorder is None else self.recorder.calling_backend():
            created = self.backend.create(store, rank, world_size, timeout)
        self._check(created, rank, world_size)
        group = as_process_group(created, store)
        label, self.made_default = "" if self.made_default else "default", True
        return group if self.recorder is None else self.recorder.wrap(group, label)

    def _check(self, created: object, rank: int, world_size: int) -> None:
        made = f"backend {self.backend.name!r}: create(store, {rank}, {world_size}, timeout) must return"
        if not isinstance(created, dist.ProcessGroup | GroupBackend):
            raise BackendError(f"{made} a c10d Backend or ProcessGroup; on rank {rank} it returned {created!r}")
        place = (created.rank(), created.size())
        if place != (rank, world_size):
            got = f"rank {place[0]} of {place[1]}"
            raise BackendError(f"{made} the group of rank {rank} of {world_size}; it returned that of {got}")


_installed: _Installation | None = None


@cache
def prepare() -> None:
    """Replace the functions by which torch makes and names groups; they do nothing until one is initialised.

    Ranks inherit them from the process that forks them, so that `relied_functions` need not compare them again.
    """
    _report_real_backend()
    _record_groups_by_real_name()


def init_process_group(
    backend: Backend, recorder: Recorder | None, *, store: Store, rank: int, world_size: int,
    timeout: timedelta = timedelta(minutes=5),
) -> dist.ProcessGroup:  # fmt: skip
    """Initialise the default group over `backend` and return it; all ranks must call it.

    `new_group` without a backend's name, or with that of `backend`, creates groups of the same kind. Without a
    `recorder` groups are not recorded. It may be called again after `dist.destroy_process_group`.
    """
    global _installed
    if _installed is None:
        dist.Backend.register_backend(REGISTERED_NAME, _create, devices=[backend.device_type])
        prepare()
    _installed = _Installation(backend, recorder)
    dist.init_process_group(REGISTERED_NAME, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return present(dist.group.WORLD)


def unconnected_group(rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of the installed backend that torch has no record of; it connects in its `reconfigure`. Local."""
    store = PrefixStore(f"unconnected/{next(_numbers)}", distributed_c10d._get_default_store())
    backend = present(_installed).backend
    if backend.create_unconnected is None:
        raise BackendError(f"backend {backend.name!r} declares reconfigure, and has no create_unconnected")
    return as_process_group(backend.create_unconnected(store, rank, world_size, timeout), store)


def leave() -> None:
    """Destroy all groups; torch makes later groups as usual."""
    global _installed
    dist.destroy_process_group()
    _installed = None


def _create(store: Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    return present(_installed).create(store, rank, world_size, timeout)


def _report_real_backend() -> None:
    """Make `dist.get_backend` return the real backend's name, on which a DDP may depend."""
    real = distributed_c10d.get_backend

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        answer = real(group)
        return _installed.backend.name if _installed is not None and answer == REGISTERED_NAME else answer

    get_backend.__doc__ = real.__doc__
    distributed_c10d.get_backend = get_backend  # type: ignore[assignment]
    dist.get_backend = get_backend  # type: ignore[assignment]


def _record_groups_by_real_name() -> None:
    """Record groups with the real backend's name, too: a DDP may communicate in a `new_group(backend="gloo")` only.

    A group with options for its backend is not recorded.
    """
    real = distributed_c10d._new_process_group_helper

    def make(size: int, rank: int, ranks: list[int], backend: str, *args: Any, **kwargs: Any) -> Any:
        is_named = _installed is not None and _is_called(backend, _installed.backend)
        ours = is_named and kwargs.get("backend_options") is None
        return real(size, rank, ranks, dist.Backend(REGISTERED_NAME) if ours else backend, *args, **kwargs)

    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def _is_called(asked: str, backend: Backend) -> bool:
    """Whether `asked`, `gloo` or `cpu:gloo,cuda:nccl`, names `backend` for its type of device."""
    return bool({backend.name, f"{backend.device_type}:{backend.name}"} & set(str(asked).lower().split(",")))
