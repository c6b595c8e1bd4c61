"""`PlainDDP` between real processes: a DDP under test like any other, `--ddp conformance.truth.on_processes:PlainDDP`.

It must pass every chapter about values whose truth it computes; it has none of the traffic that other chapters judge.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from conformance.own_mistake import instance, present
from conformance.truth import plain_ddp


class RealPlace:
    """Where the processes of a group meet: everyone sends what it brings to everyone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Meet over `group`."""
        self.group = group

    def rank(self) -> int:
        """Return this process's number in the group."""
        return self.group.rank()

    def size(self) -> int:
        """Return the number of processes."""
        return self.group.size()

    def come(self, of: object, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Meet at once: all processes of the group must call it in the same order."""
        brought: list[Any] = [None] * self.size()
        dist.all_gather_object(brought, value, group=self.group)
        return combine(brought)[self.rank()]

    def outcome(self, meeting: Any) -> Any:
        """Return what `come` returned."""
        return meeting


_PLACES: weakref.WeakKeyDictionary[dist.ProcessGroup, RealPlace] = weakref.WeakKeyDictionary()


class PlainDDP(plain_ddp.PlainDDP):
    """A `PlainDDP` over a process group, the default one if none is given."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(module, self.place_of(process_group or present(dist.group.WORLD)), **options)

    @staticmethod
    def place_of(group: Any) -> plain_ddp.Place:
        """Return where the processes of a group meet."""
        return _PLACES.setdefault(group, RealPlace(group))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group over which gradients are averaged."""
        return instance(self.place, RealPlace).group
