"""Runs a function once per rank, on threads that take turns, each in a world of `torch.distributed` of its own."""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    HashStore,
    _register_process_group,
    _unregister_process_group,
    get_debug_level,
    set_debug_level,
)
from torch.distributed import distributed_c10d

from conformance.errors import instance
from conformance.truth.baton import Baton, DesertedError
from conformance.truth.plain_group import BACKEND, FIRST_NUMBER, PlainGroup


class RankWorld(distributed_c10d._World):
    """What `torch.distributed` knows in one rank: its groups. torch keeps it once per process."""

    def __init__(self, rank: int) -> None:
        """Begin without groups; the names that torch gives to this rank's are no other rank's of the process."""
        super().__init__()
        self._count = FIRST_NUMBER * (rank + 1)
        self._tables: dict[str, dict[Any, Any]] = {}

    def _table(self, name: str) -> dict[Any, Any]:
        return self._tables.setdefault(name, {})

    pg_map = property(lambda self: self._table("pg_map"))
    pg_names = property(lambda self: self._table("pg_names"))
    pg_group_ranks = property(lambda self: self._table("pg_group_ranks"))
    pg_backend_config = property(lambda self: self._table("pg_backend_config"))
    tags_to_pg = property(lambda self: self._table("tags_to_pg"))
    pg_to_tag = property(lambda self: self._table("pg_to_tag"))

    @property
    def group_count(self) -> int:
        """The number in the name of the next group."""
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value

    def make_default(self, group: PlainGroup) -> None:
        """Make `group` the default one; the world must be the process's at this moment."""
        name = distributed_c10d._process_group_name([], use_hashed_name=False)
        distributed_c10d._update_default_pg(group)
        self._know(group, name)
        group._set_group_name(name)

    def make(self, ranks: Sequence[int], group_name: str) -> PlainGroup | None:
        """Make a group of `ranks` as `torch.distributed.new_group` asks for one; None on other ranks."""
        group = instance(self.default_pg, PlainGroup).new_group(ranks, group_name=group_name)
        if group is not None:
            self._know(group, group_name)
            self.tags_to_pg.setdefault("", []).append(group)
        return group

    def _know(self, group: PlainGroup, name: Any) -> None:
        self.pg_map[group] = (BACKEND, HashStore())
        self.pg_names[group] = name
        self.pg_group_ranks[group] = {member: index for index, member in enumerate(group.members)}
        self.pg_backend_config[group] = str(distributed_c10d.BackendConfig(dist.Backend(BACKEND)))
        self.pg_to_tag[group] = tag = f"ptd:{name}"
        self.tags_to_pg[tag] = [group]
        _register_process_group(name, group)

    def forget(self) -> None:
        """Give the names of all groups back; the world must be the process's at this moment."""
        for name in self.pg_names.values():
            _unregister_process_group(name)
        self._tables.clear()
        distributed_c10d._update_default_pg(None)


class _World:
    """`torch.distributed`'s state as something that each rank takes for its own."""

    def take(self) -> Any:
        return distributed_c10d._world

    def give(self, state: Any) -> None:
        distributed_c10d._world = state
        distributed_c10d._update_default_pg(state.default_pg)  # C++ code has its own note of the default group


class _RandomState:
    def take(self) -> Any:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    def give(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


class _Warnings:
    """What `warnings.catch_warnings` and `torch.set_warn_always` change, which a rank must find as it has left it."""

    _NAMES = ("filters", "showwarning", "_showwarnmsg_impl")

    def take(self) -> Any:
        return torch.is_warn_always_enabled(), [getattr(warnings, name) for name in self._NAMES]

    def give(self, state: Any) -> None:
        torch.set_warn_always(state[0])
        for name, value in zip(self._NAMES, state[1], strict=True):
            setattr(warnings, name, value)
        warnings._filters_mutated()  # type: ignore[attr-defined]


class _Debugging:
    """Whether backwards look for anomalies, and how much `torch.distributed` tells."""

    def take(self) -> Any:
        return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), get_debug_level()

    def give(self, state: Any) -> None:
        torch.set_anomaly_enabled(*state[:2])
        set_debug_level(state[2])


class _Environment:
    """The variables of the environment, as they are stored: to decode them took a third of what is carried."""

    def take(self) -> Any:
        return dict(os.environ._data)  # type: ignore[attr-defined]

    def give(self, state: Any) -> None:
        if state != os.environ._data:  # type: ignore[attr-defined]
            os.environb.clear()
            os.environb.update(state)


@contextmanager
def _as_it_was(*carried: Any) -> Iterator[None]:
    before = [one.take() for one in carried]
    try:
        yield
    finally:
        for one, state in zip(carried, before, strict=True):
            one.give(state)


@contextmanager
def _new_groups_are_plain() -> Iterator[None]:
    """Let `torch.distributed.new_group` make plain groups: before torch 2.13 it does not ask the default group."""
    if hasattr(distributed_c10d, "_register_pg_in_world"):
        yield
        return

    def make(size: int, rank: int, ranks: list[int], backend: Any, store: Any, group_name: str, **_: Any) -> Any:
        group = instance(distributed_c10d._world, RankWorld).make(ranks, group_name)
        return (dist.GroupMember.NON_GROUP_MEMBER, None) if group is None else (group, store)

    with mock.patch.object(distributed_c10d, "_new_process_group_helper", make):
        yield


@contextmanager
def _backwards_run_where_they_are_called() -> Iterator[None]:
    """Let every thread that starts, a program's own too, run its backwards by itself, on whatever device.

    A device's thread would run those of all ranks, and wait in one for the others.
    """
    usual = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            usual(thread)

    with mock.patch.object(threading.Thread, "run", run):
        yield


def on_plain_ranks(num_ranks: int, main: Callable[[int, PlainGroup], Any]) -> Mapping[int, Any]:
    """Return what `main(rank, default group)` returns on each of `num_ranks` plain ranks.

    Every rank begins with the random state that the caller has. Raises what the first rank that raised has raised;
    `DesertedError` where ranks wait for each other.
    """
    world, others = _World(), (_RandomState(), _Warnings(), _Environment(), _Debugging())
    with _as_it_was(world, *others), _new_groups_are_plain(), _backwards_run_where_they_are_called():
        start = [one.take() for one in others]
        worlds = [RankWorld(rank) for rank in range(num_ranks)]
        states = {rank: (one, *start) for rank, one in enumerate(worlds)}
        baton = Baton(num_ranks, states, (world, *others))
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                baton.begin(rank)
                torch.set_num_threads(1)
                group = PlainGroup(baton, range(num_ranks), rank, "default")
                worlds[rank].make_default(group)
                results[rank] = main(rank, group)
            except BaseException as error:
                errors.append(error)
            finally:
                baton.end(rank)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True, name=f"plain rank {rank}")
                   for rank in range(num_ranks)]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in worlds:
            world.give(one)
            one.forget()
    if errors:  # those who waited in vain came to nothing because of the others
        raise next((error for error in errors if not isinstance(error, DesertedError)), errors[0])
    return {rank: results[rank] for rank in range(num_ranks)}
