"""Mutants of chapter neighbours: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.bucket import ManagedParameter
from ddp_impl.reducer import Reducer


@as_part
class LeavesWithItsLastGradient(Reducer):
    """BUG: a bucket leaves with the last gradient that this rank uses, whatever other ranks use."""

    def _expect(self) -> None:
        super()._expect()
        if self.options.find_unused_parameters:
            absent = [index for index, comes in enumerate(self.search.coming()) if not comes]
            self.usage.unused.update(absent)
            for bucket in self.arrivals.exclude(absent):
                self._bucket_full(bucket)

    def _hold_back(self, sure: Sequence[bool]) -> None:
        if not self.options.find_unused_parameters:
            super()._hold_back(sure)

    def _is_welcome_late(self, index: int) -> bool:
        return False


@as_part
class TellsWithItsFirstBucket(Reducer):
    """BUG: what is sure to come is exchanged when this rank's first bucket is full, and not when backward begins."""

    def _tell_others(self, coming: Sequence[bool]) -> None:
        if self._is_asked:
            super()._tell_others(coming)

    def _read_forecast(self) -> None:
        self._is_asked = True
        super()._read_forecast()
        self._is_asked = False

    _is_asked = False


@as_part
class FullOnesEndFirst(Reducer):
    """BUG: wrappers that miss no gradient end before those that do, whatever the order of their construction."""

    @property
    def construction(self) -> Any:  # type: ignore[override]
        return bool(self.arrivals.missing), self.__dict__["construction"]


class AllAreLocalTogether(Ours):
    """BUG: `no_sync` of one wrapper is that of all wrappers of the process."""

    _all: weakref.WeakSet[AllAreLocalTogether] = weakref.WeakSet()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all.add(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as local:
            for wrapper in list(self._all):
                local.enter_context(super(AllAreLocalTogether, wrapper).no_sync())
            yield


@replaces(Ours, "_attach_reducer")
def DividesByTheWorld(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: sums are divided by the number of all ranks, those of the wrapper's group or not."""
    attach_reducer(members)
    ddp.reducer.divisor = dist.get_world_size()


@replaces(Reducer, "_hold_back")
def GivesUpHiddenGradients(reducer: Reducer, hold_back: Call, sure: Sequence[bool]) -> None:
    """BUG: what a function of the user's own hides is taken for unused, and its bucket leaves without it."""
    absent: Collection[int] = [index for index, comes in enumerate(sure) if not comes]
    reducer.usage.unused.update(absent)
    for bucket in reducer.arrivals.exclude(absent):
        reducer._bucket_full(bucket)
