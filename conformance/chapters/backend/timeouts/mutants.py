"""Mutants of chapter timeouts: backends that wait too long, or not long enough, or say nothing of it."""

import time
from datetime import timedelta
from typing import Any

import torch

from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import WorkAround, WorkDone, finished, gives, of_class, spoils, spoils_work


@of_class
class drops_the_timeout(Relay):
    """BUG: the timeout of a group is lost when it is made."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timedelta(hours=1))


@spoils("allreduce", "allgather", "broadcast", "barrier")
def drops_own_timeouts(group: Any, call: Any, *args: Any) -> Any:
    """BUG: the timeout of a single operation is ignored."""
    args[-1].timeout = timedelta(milliseconds=-1)
    return call(*args)


@spoils("alltoall")
def drops_own_timeouts_of_lists(group: Any, call: Any, *args: Any) -> Any:
    """BUG: the timeout of a single all_to_all of lists is ignored."""
    args[-1].timeout = timedelta(milliseconds=-1)
    return call(*args)


@spoils_work("wait", "allreduce", "broadcast", "allgather")
def ignores_the_waiter(work: WorkAround, wait: Any, *timeout: Any) -> Any:
    """BUG: wait(timeout) waits without one."""
    return wait()


@gives("allreduce", "allgather")
class forgets_its_error(WorkAround):
    """BUG: a Work that failed raises once; later waits return."""

    failed = False

    def wait(self, *timeout: Any) -> bool:
        if self.failed:
            return True
        try:
            return super().wait(*timeout)
        except RuntimeError:
            self.failed = True
            raise


@gives("allreduce", "allgather")
class holds_no_error(WorkAround):
    """BUG: a Work that failed has no exception(), and counts as a success."""

    def exception(self) -> None:
        return None

    def is_success(self) -> bool:
        return True


@gives("allreduce", "allgather")
class never_ends(WorkAround):
    """BUG: a Work that failed is never completed."""

    failed = False

    def wait(self, *timeout: Any) -> bool:
        try:
            return super().wait(*timeout)
        except RuntimeError:
            self.failed = True
            raise

    def is_completed(self) -> bool:
        return not self.failed and super().is_completed()


@spoils("gather", "scatter")
def gathers_without_timeout(group: Any, call: Any, *args: Any) -> Any:
    """BUG: gather and scatter drop the group's timeout."""
    args[-1].timeout = timedelta(hours=1)
    return call(*args)


@spoils("allreduce", "barrier")
def hides_timeouts(group: Any, call: Any, *args: Any) -> Any:
    """BUG: what timed out is taken for done."""
    try:
        return finished(call(*args))
    except RuntimeError:
        return WorkDone()


@spoils("allreduce", "barrier")
def is_impatient(group: Any, call: Any, *args: Any) -> Any:
    """BUG: a rank that is slow by a fifth of a second is taken for lost."""
    args[-1].timeout = timedelta(milliseconds=200)
    return call(*args)


@spoils("gather", "scatter")
def has_a_second_for_lists(group: Any, call: Any, *args: Any) -> Any:
    """BUG: gather and scatter give up after one second, whatever the group's timeout."""
    args[-1].timeout = timedelta(seconds=1)
    return call(*args)


@spoils("allreduce", "barrier")
def counts_idle_time(group: Any, call: Any, *args: Any) -> Any:
    """BUG: the timeout of a collective counts from the end of the one before."""
    before, group.last = getattr(group, "last", time.monotonic()), time.monotonic()
    if group.last - before > 4:
        args[-1].timeout = timedelta(milliseconds=100)
    return call(*args)


@spoils("allgather", "all_to_all_single")
def loses_errors_of_long_tensors(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an operation on a quarter of a MiB and more that failed is taken for done."""
    sent = inputs if isinstance(inputs, torch.Tensor) else inputs[0]
    if sent.numel() * sent.element_size() < 2**18:
        return call(outputs, inputs, *options)
    try:
        return finished(call(outputs, inputs, *options))
    except RuntimeError:
        return WorkDone()


@spoils("allgather", "alltoall", "reduce_scatter", "gather")
def loses_errors_behind_what_went_well(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: once an operation on tensors of some shape has ended well in a group, one that fails is taken for done."""
    sent = inputs if isinstance(inputs[0], torch.Tensor) else inputs[0]
    key, well = tuple(one.shape for one in sent), group.__dict__.setdefault("well", set())
    try:
        work = finished(call(outputs, inputs, *options))
    except RuntimeError:
        if key not in well:
            raise
        return WorkDone()
    well.add(key)
    return work


@of_class
class keeps_its_first_timeout(Relay):
    """BUG: set_timeout changes nothing."""

    def set_timeout(self, timeout: timedelta) -> None:
        pass
