"""Runs a function once per rank, on threads that take turns, each with its own world of `torch.distributed`."""

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
    """The groups of one rank in `torch.distributed`, which torch keeps once per process."""

    def __init__(self, rank: int) -> None:
        """Begin without groups; torch gives this rank's groups names that no other rank of the process has."""
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
        """Make `group` the default group; the world must be installed."""
        name = distributed_c10d._process_group_name([], use_hashed_name=False)
        distributed_c10d._update_default_pg(group)
        self._know(group, name)
        group._set_group_name(name)

    def make(self, ranks: Sequence[int], group_name: str) -> PlainGroup | None:
        """Make a group of `ranks` for `torch.distributed.new_group`; None on other ranks."""
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
        """Unregister all groups; the world must be installed."""
        for name in self.pg_names.values():
            _unregister_process_group(name)
        self._tables.clear()
        distributed_c10d._update_default_pg(None)


class _World:
    """The state of `torch.distributed`."""

    def take(self) -> Any:
        return distributed_c10d._world

    def give(self, state: Any) -> None:
        distributed_c10d._world = state
        distributed_c10d._update_default_pg(state.default_pg)  # also in C++


class _RandomState:
    def take(self) -> Any:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    def give(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


class _Warnings:
    """The state that `warnings.catch_warnings` and `torch.set_warn_always` change."""

    _NAMES = ("filters", "showwarning", "_showwarnmsg_impl")

    def take(self) -> Any:
        return torch.is_warn_always_enabled(), [getattr(warnings, name) for name in self._NAMES]

    def give(self, state: Any) -> None:
        torch.set_warn_always(state[0])
        for name, value in zip(self._NAMES, state[1], strict=True):
            setattr(warnings, name, value)
        warnings._filters_mutated()  # type: ignore[attr-defined]


class _Debugging:
    """Anomaly detection and the debug level of `torch.distributed`."""

    def take(self) -> Any:
        return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), get_debug_level()

    def give(self, state: Any) -> None:
        torch.set_anomaly_enabled(*state[:2])
        set_debug_level(state[2])


class _Environment:
    """The environment's variables, undecoded: decoding took a third of the time of a switch."""

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
    """Make `torch.distributed.new_group` create plain groups: before torch 2.13 it does not call the default group."""
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
    """Make every new thread, also of a program, run its backwards itself, on any device.

    A device's thread would run the backwards of all ranks, and wait in one for the others.
    """
    usual = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            usual(thread)

    with mock.patch.object(threading.Thread, "run", run):
        yield


def on_plain_ranks(num_ranks: int, main: Callable[[int, PlainGroup], Any]) -> Mapping[int, Any]:
    """Return what `main(rank, default group)` returns on each of `num_ranks` plain ranks.

    Every rank begins with the caller's random state. Raises the first error of a rank; `DesertedError` for a deadlock.
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
    if errors:  # a deserted rank is a consequence
        raise next((error for error in errors if not isinstance(error, DesertedError)), errors[0])
    return {rank: results[rank] for rank in range(num_ranks)}
