"""The groups of a scenario's operations, made at first use."""

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
#: Makes torch wait, by the store, until all ranks have made a group.
_MEET = "TORCH_DIST_INIT_BARRIER"
#: A key of the store serves one group only: a later scenario would find the addresses of an earlier one.
_numbers = itertools.count()


#: Descriptions of groups.
_WHOSE = {
    "permuted": "all ranks in reverse order",
    "twin": "the same ranks as another group",
    "without-0": "all ranks but 0",
    "ends": "the first and the last rank",
    "alone": "each rank alone",
}


def whose(name: str) -> str:
    """Return a description of the group called `name`, for a sentence."""
    plain = name.partition("#")[0]
    return _WHOSE.get(plain, f"the group called {plain}")


def members_of(name: str, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the global ranks of the group called `name` for `rank`, which need not be a member.

    See `whose`; a suffix after # distinguishes groups of the same ranks.
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
        """Return the group called `name`; on a rank that is no member of it, what `new_group` returns there."""
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
        """Return torch's wrapper around the backend of that group, as at debug level DETAIL."""
        if name not in self._wrappers:
            group = self.get(name)
            store = PrefixStore(f"wrapper/{name}/{next(_numbers)}", dist.distributed_c10d._get_default_store())
            # It connects over the same interface as the backend.
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
        # Wait until all ranks have made it: a fast rank may destroy it while a slow rank still connects to it.
        with _environment(_MEET, "1"):
            return dist.new_group(ranks, timeout=self.timeout)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set one variable for the block; `mock.patch.dict` sets all of them again, which takes longer than a group."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
