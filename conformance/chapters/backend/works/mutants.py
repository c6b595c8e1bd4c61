"""Mutants of chapter works: backends whose Works say what is not so."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch

from conformance.mutants.spoilt import WorkAround, finished, gives, spoils

_COLLECTIVES = ("allreduce", "allgather", "all_gather_single", "broadcast")


class _WaitsForNothing(WorkAround):
    """BUG: wait() returns at once."""

    def wait(self, *timeout: Any) -> bool:
        return True


class _IsDoneAtOnce(WorkAround):
    """BUG: is_completed() is True from the beginning."""

    def is_completed(self) -> bool:
        return True


class _IsDoneWhenWaitedFor(WorkAround):
    """BUG: is_completed() is False until somebody has waited."""

    waited = False

    def wait(self, *timeout: Any) -> bool:
        self.waited = super().wait(*timeout)
        return self.waited

    def is_completed(self) -> bool:
        return self.waited


class _AsksInVain(WorkAround):
    """BUG: is_completed() waits until it is so."""

    def is_completed(self) -> bool:
        return self.wait()


class _ReturnsNothing(WorkAround):
    """BUG: wait() returns None."""

    def wait(self, *timeout: Any) -> Any:
        super().wait(*timeout)


class _WaitsOnce(WorkAround):
    """BUG: a second wait() raises."""

    waited = False

    def wait(self, *timeout: Any) -> bool:
        if self.waited:
            raise RuntimeError("this Work has been waited for")
        self.waited = True
        return super().wait(*timeout)


class _KnowsItsThread(WorkAround):
    """BUG: only the thread that called may wait."""

    def wait(self, *timeout: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("called by another thread")
        return super().wait(*timeout)


class _FailsAfterwards(WorkAround):
    """BUG: is_success() is False for a Work that succeeded."""

    def is_success(self) -> bool:
        return False


class _KeepsAnError(WorkAround):
    """BUG: exception() gives an error where wait() raised none."""

    def exception(self) -> Any:
        return "an error"


class _GivesOthers(WorkAround):
    """BUG: result() gives other tensors than the outputs."""

    def result(self) -> Any:
        return [torch.zeros(3)]


class _HoldsThemBackwards(WorkAround):
    """BUG: the future of an all_gather holds the outputs in reverse order."""

    def get_future(self) -> Any:
        outputs = self.tensors[0] if isinstance(self.tensors[0], list) else list(self.tensors)
        return self.inner.get_future().then(lambda done: outputs[::-1])


class _FutureIsDoneAtOnce(WorkAround):
    """BUG: the future is done before the data is there."""

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


class _FutureIsNeverDone(WorkAround):
    """BUG: the future is done only when somebody waits for the Work."""

    def get_future(self) -> Any:
        if not hasattr(self, "future"):
            self.future: torch.futures.Future[Any] = torch.futures.Future()
        return self.future


class _CallsBackTwice(WorkAround):
    """BUG: callbacks of the future run twice."""

    def get_future(self) -> Any:
        real = self.inner.get_future()

        class Twice(torch.futures.Future[Any]):
            """Calls twice."""

            def then(self, callback: Any) -> Any:
                real.then(callback).wait()
                return real.then(callback)

            def wait(self) -> Any:
                return real.wait()

            def done(self) -> bool:
                return bool(real.done())

            def value(self) -> Any:
                return real.value()

        return Twice()


waits_for_nothing = gives(_WaitsForNothing, *_COLLECTIVES)
is_done_at_once = gives(_IsDoneAtOnce, *_COLLECTIVES)
is_done_when_waited_for = gives(_IsDoneWhenWaitedFor, *_COLLECTIVES)
asks_in_vain = gives(_AsksInVain, *_COLLECTIVES)
returns_nothing = gives(_ReturnsNothing, *_COLLECTIVES)
waits_once = gives(_WaitsOnce, *_COLLECTIVES)
knows_its_thread = gives(_KnowsItsThread, *_COLLECTIVES)
fails_afterwards = gives(_FailsAfterwards, *_COLLECTIVES)
keeps_an_error = gives(_KeepsAnError, *_COLLECTIVES)
gives_others = gives(_GivesOthers, *_COLLECTIVES)
holds_them_backwards = gives(_HoldsThemBackwards, "allgather")
future_is_done_at_once = gives(_FutureIsDoneAtOnce, *_COLLECTIVES)
future_is_never_done = gives(_FutureIsNeverDone, "allreduce")
calls_back_twice = gives(_CallsBackTwice, "allreduce")


class _Lazy(WorkAround):
    """Calls gloo when somebody waits."""

    def __init__(self, call: Any) -> None:
        super().__init__(None)
        self._call = call

    def wait(self, *timeout: Any) -> bool:
        if self.inner is None:
            self.inner = self._call()
        return super().wait(*timeout)

    def is_completed(self) -> bool:
        return self.inner is not None and super().is_completed()


@spoils("allgather")
def begins_when_waited_for(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather begins when somebody waits for it, and never where its Work was dropped."""
    return _Lazy(lambda: call(outputs, inputs, *options))


@spoils("allgather")
def forgets_its_inputs(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather reads its input at the end, and does not keep it until then."""
    last, zeros = weakref.ref(inputs[0]), torch.zeros_like(inputs[0])

    def late() -> Any:
        kept = last()
        return call(outputs, [zeros if kept is None else kept], *options)

    return _Lazy(late)


@spoils("allreduce")
def gives_one_work_to_all(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: sums in flight share the Work of the first of them."""
    work = call(tensors, *options)
    first = getattr(group, "first", None)
    if first is None or first.is_completed():
        group.first = WorkAround(work)
    return group.first


@spoils("allreduce")
def minds_the_order_of_waits(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: to wait for a later sum before an earlier one is an error."""
    pending: list[Any] = group.__dict__.setdefault("pending", [])

    class InOrder(WorkAround):
        """Is waited for in order."""

        def wait(self, *timeout: Any) -> bool:
            if self in pending and pending[0] is not self:
                raise RuntimeError("an earlier Work has not been waited for")
            if self in pending:
                pending.remove(self)
            return super().wait(*timeout)

    pending.append(InOrder(call(tensors, *options)))
    return pending[-1]


@spoils("allreduce", "all_gather_single")
def is_never_asynchronous(group: Any, call: Any, *args: Any) -> Any:
    """BUG: the call waits for all ranks, also where it is asynchronous."""
    return finished(call(*args))


@spoils("allreduce")
def returns_before_the_end(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a synchronous all_reduce comes back before its result is there, and gives no Work."""
    if options and options[0].asyncOp:
        return call(tensors, *options)
    private = [each.clone() for each in tensors]
    work = call(private, *options)

    def finish() -> None:
        work.wait()
        time.sleep(0.05)
        for each, value in zip(tensors, private, strict=True):
            each.detach().copy_(value)

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    return None if getattr(options[0] if options else None, "asyncOp", True) is False else work
