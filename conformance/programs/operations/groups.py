"""The groups in which a scenario tries operations, made when they are first asked for."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from conformance.programs.operations.calls import device_backend

_INTERFACE, _LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
#: Has torch wait, by the store, until all ranks have made a group.
_MEET = "TORCH_DIST_INIT_BARRIER"
#: A key of the store serves one group only: a later scenario would find the addresses of an earlier one.
_numbers = itertools.count()


#: What the groups are whose names do not say it.
_WHOSE = {
    "permuted": "all ranks in reverse order",
    "twin": "the same ranks as another group",
    "without-0": "all ranks but 0",
    "ends": "the first and the last rank",
    "alone": "each rank alone",
}


def whose(name: str) -> str:
    """Return whose group that is, for a sentence."""
    plain = name.partition("#")[0]
    return _WHOSE.get(plain, f"the group called {plain}")


def members_of(name: str, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the global ranks of the group called `name` that `rank` is to use; it may not be one of them.

    The world's are all ranks, and those of the others as `whose` says. What is behind a # tells groups of the same
    ranks from each other.
    """
    name = name.partition("#")[0]
    everybody = tuple(range(world_size))
    if name == "without-0":
        return everybody[1:] or everybody
    if name == "ends":
        return tuple(dict.fromkeys((0, world_size - 1)))
    return (rank,) if name == "alone" else everybody


@dataclass
class Groups:
    """One rank's groups. All ranks must ask for the same ones in the same order."""

    world: Any
    rank: int
    world_size: int
    device: torch.device
    timeout: timedelta | None = None
    _made: dict[str, Any] = field(default_factory=dict)
    _wrappers: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Return the group called `name`; on a rank that is no member of it, what `new_group` gives there."""
        if name == "world":
            return self.world
        if name not in self._made:
            if name.partition("#")[0] == "alone":
                made = [self._new([rank]) for rank in range(self.world_size)]
                self._made[name] = made[self.rank]
            else:
                ranks = members_of(name, self.rank, self.world_size)
                self._made[name] = self._new(list(reversed(ranks)))
        return self._made[name]

    def wrapper(self, name: str) -> Any:
        """Return the wrapper that torch puts round the backend of that group at debug level DETAIL."""
        if name not in self._wrappers:
            group = self.get(name)
            store = PrefixStore(f"wrapper/{name}/{next(_numbers)}", dist.distributed_c10d._get_default_store())
            # Its own connections go by the same way as those of the backend of this name.
            with _environment(_INTERFACE, os.environ.get(_INTERFACE, _LOOPBACK)):
                self._wrappers[name] = dist.distributed_c10d._create_process_group_wrapper(
                    wrapped_pg=device_backend(group, self.device),
                    store_prefix=f"wrapper/{name}",
                    store=store,
                    rank=group.rank(),
                    world_size=group.size(),
                )
        return self._wrappers[name]

    def destroy(self) -> None:
        """Destroy every group that was made here."""
        self._wrappers.clear()
        for group in self._made.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._made.clear()

    def _new(self, ranks: list[int]) -> Any:
        # Until all ranks have made it: one that goes on may soon destroy it, while another still connects to that one.
        with _environment(_MEET, "1"):
            return dist.new_group(ranks, timeout=self.timeout)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set one variable for the block; `mock.patch.dict`, which sets all of them anew, takes longer than a group."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
