"""Mutants of chapter fates: backends that do not get over a peer that is late, or lost."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance.mutants.modest import MODEST, Modest
from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import WorkAround, WorkDone, finished, gives, made_from, of_class, spoils


class _Swallows(WorkAround):
    """Takes an error that holds `word` for the end."""

    word = ""

    def wait(self, *timeout: Any) -> bool:
        try:
            return super().wait(*timeout)
        except RuntimeError as error:
            if self.word not in str(error):
                raise
            return True


@spoils("gather", "scatter", "alltoall", "all_to_all_single")
def drops_late_peers(group: Any, call: Any, *args: Any) -> Any:
    """BUG: a peer that is late by a tenth of a second is given up."""
    args[-1].timeout = timedelta(milliseconds=100)
    return call(*args)


@spoils("allreduce")
def sums_without_late_peers(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a peer that is late by more than 1.5 seconds is left out of a sum."""
    began, own = time.monotonic(), tensors[0].clone()
    work = finished(call(tensors, *options))
    if time.monotonic() - began > 1.5:
        tensors[0].copy_(own)
    return work


@gives("allreduce", "reduce")
class forgives_deaths(_Swallows):
    """BUG: a connection that breaks is taken for the end of the operation."""

    word = "onnection"


@gives("alltoall", "all_to_all_single")
class forgives_silence(_Swallows):
    """BUG: what timed out is taken for done."""

    word = "imed out"


@gives("recv")
class overhears_deaths(WorkAround):
    """BUG: a receive does not see that its connection is closed, and ends with the group's timeout."""

    def wait(self, *timeout: Any) -> bool:
        try:
            return super().wait(*timeout)
        except RuntimeError as error:
            if "onnection" in str(error):
                time.sleep(9.0)
            raise


@gives("recv")
class receives_without_timeout(WorkAround):
    """BUG: a receive waits for ever."""

    def wait(self, *timeout: Any) -> bool:
        return bool(self.inner.wait(timedelta(hours=1)))


@of_class
class counts_leavers_as_done(Relay):
    """BUG: who has left counts as having taken part, and the others reduce nothing."""

    def shutdown(self) -> None:
        self.get_group_store().set("left", "")
        super().shutdown()

    def allreduce(self, *args: Any) -> Any:
        return WorkDone() if self.get_group_store().check(["left"]) else self.inner.allreduce(*args)


@of_class
class loses_all_groups(Relay):
    """BUG: after an error in one group, sums are wrong in all of them."""

    lost = False

    def allgather(self, *args: Any) -> Any:
        return _Loses(self.inner.allgather(*args))

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        if loses_all_groups.create.lost:  # type: ignore[attr-defined]
            tensors[0].zero_()
        return self.inner.allreduce(tensors, *options)


class _Loses(WorkAround):
    def wait(self, *timeout: Any) -> bool:
        try:
            return super().wait(*timeout)
        except RuntimeError:
            loses_all_groups.create.lost = True  # type: ignore[attr-defined]
            raise


@of_class
class cannot_be_destroyed(Relay):
    """BUG: a group that waits for the answer of every rank before it ends."""

    failed = False

    def broadcast(self, *args: Any) -> Any:
        return _Remembers(self.inner.broadcast(*args), self)

    def shutdown(self) -> None:
        if self.failed:
            threading.Event().wait()
        super().shutdown()


class _Remembers(WorkAround):
    def wait(self, *timeout: Any) -> bool:
        try:
            return super().wait(*timeout)
        except RuntimeError:
            self.tensors.failed = True
            raise


@of_class
class waits_for_the_missing(Relay):
    """BUG: a group whose ranks do not all come is waited for twenty times as long as its timeout says."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, 20 * timeout)


@spoils("monitored_barrier")
def names_nobody(group: Any, call: Any, *args: Any) -> Any:
    """BUG: a monitored barrier does not say who is missing."""
    try:
        return call(*args)
    except RuntimeError:
        raise RuntimeError("some rank is missing") from None


@made_from(MODEST)
class ends_no_wait(Modest):
    """BUG: abort(), which it declares, lets a wait() that goes on go on."""

    def abort(self) -> None:
        pass


@made_from(MODEST)
class counts_the_aborted_as_done(Modest):
    """BUG: a wait() that abort() ends returns as if the operation were done."""

    def allreduce(self, *args: Any) -> Any:
        return _Forgives(super().allreduce(*args))


class _Forgives(_Swallows):
    word = "aborted"


@gives("gather", "all_to_all_single", "broadcast")
class keeps_quiet_among_four(WorkAround):
    """BUG: in groups of four ranks and more, the wait for an operation that failed raises nothing."""

    def wait(self, *timeout: Any) -> bool:
        try:
            return super().wait(*timeout)
        except RuntimeError:
            if dist.get_world_size() < 4:
                raise
            return True
