"""Mutants of chapter works: backends whose Works say what is not so."""

import threading
import time
import weakref
from typing import Any

import torch

from conformance.mutants.spoilt import WorkAround, WorkDone, finished, gives, spoils, spoils_work

_COLLECTIVES = ("allreduce", "allgather", "all_gather_single", "broadcast")
#: So many elements has the one buffer of `holds_results_in_one_buffer`.
_ROOM = 100


@spoils_work("wait", *_COLLECTIVES)
def waits_for_nothing(work: WorkAround, wait: Any, *timeout: Any) -> bool:
    """BUG: wait() returns at once."""
    return True


@spoils_work("is_completed", *_COLLECTIVES)
def is_done_at_once(work: WorkAround, is_completed: Any) -> bool:
    """BUG: is_completed() is True from the beginning."""
    return True


@gives(*_COLLECTIVES)
class is_done_when_waited_for(WorkAround):
    """BUG: is_completed() is False until somebody has waited."""

    waited = False

    def wait(self, *timeout: Any) -> bool:
        self.waited = super().wait(*timeout)
        return self.waited

    def is_completed(self) -> bool:
        return self.waited


@spoils("barrier")
def never_ends_barriers(group: Any, call: Any, *options: Any) -> Any:
    """BUG: is_completed() of a barrier is False for ever."""

    class Endless(WorkAround):
        def is_completed(self) -> bool:
            return False

    return Endless(call(*options))


@spoils_work("is_completed", *_COLLECTIVES)
def asks_in_vain(work: WorkAround, is_completed: Any) -> bool:
    """BUG: is_completed() waits until it is so."""
    return work.wait()


@spoils_work("wait", *_COLLECTIVES)
def returns_nothing(work: WorkAround, wait: Any, *timeout: Any) -> Any:
    """BUG: wait() returns None."""
    wait(*timeout)


@gives(*_COLLECTIVES)
class waits_once(WorkAround):
    """BUG: a second wait() raises."""

    waited = False

    def wait(self, *timeout: Any) -> bool:
        if self.waited:
            raise RuntimeError("this Work has been waited for")
        self.waited = True
        return super().wait(*timeout)


@spoils_work("wait", *_COLLECTIVES)
def knows_its_thread(work: WorkAround, wait: Any, *timeout: Any) -> Any:
    """BUG: only the thread that called may wait."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("called by another thread")
    return wait(*timeout)


@spoils_work("is_success", *_COLLECTIVES)
def fails_afterwards(work: WorkAround, is_success: Any) -> bool:
    """BUG: is_success() is False for a Work that succeeded."""
    return False


@spoils_work("exception", *_COLLECTIVES)
def keeps_an_error(work: WorkAround, exception: Any) -> Any:
    """BUG: exception() gives an error where wait() raised none."""
    return "an error"


@spoils_work("result", *_COLLECTIVES)
def gives_others(work: WorkAround, result: Any) -> Any:
    """BUG: result() gives other tensors than the outputs."""
    return [torch.zeros(3)]


@spoils("allgather")
def gives_its_input(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: result() of an all_gather gives its input."""

    class OfInput(WorkAround):
        def result(self) -> Any:
            return inputs

    return OfInput(call(outputs, inputs, *options))


@spoils_work("get_future", "allgather")
def holds_them_backwards(work: WorkAround, get_future: Any) -> Any:
    """BUG: the future of an all_gather holds the outputs in reverse order."""
    outputs = work.tensors[0] if isinstance(work.tensors[0], list) else list(work.tensors)
    return work.inner.get_future().then(lambda done: outputs[::-1])


@spoils_work("get_future", *_COLLECTIVES)
def future_is_done_at_once(work: WorkAround, get_future: Any) -> Any:
    """BUG: the future is done before the data is there."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([])
    return future


@spoils_work("get_future", "allreduce")
def future_is_never_done(work: WorkAround, get_future: Any) -> Any:
    """BUG: the future is done only when somebody waits for the Work."""
    return vars(work).setdefault("future", torch.futures.Future())


@spoils_work("get_future", "allreduce")
def calls_back_twice(work: WorkAround, get_future: Any) -> Any:
    """BUG: callbacks of the future run twice."""
    real = work.inner.get_future()

    class Twice(torch.futures.Future[Any]):
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


@spoils_work("wait", "broadcast")
def copies_out_at_every_wait(work: WorkAround, wait: Any, *timeout: Any) -> Any:
    """BUG: wait() copies the result of a broadcast out, also the second time."""
    done = wait(*timeout)
    (tensor,) = work.tensors
    tensor.copy_(work.__dict__.setdefault("kept", tensor.clone()))
    return done


@spoils("allreduce")
def has_one_thread_for_callbacks(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a callback runs in the thread that makes progress, so that an all_reduce that it asks for never begins."""
    if isinstance(threading.current_thread(), threading._DummyThread):
        time.sleep(1000)
    return call(tensors, *options)


@spoils("broadcast")
def is_done_before_it_is_read(group: Any, call: Any, tensors: Any, options: Any) -> Any:
    """BUG: the root of a broadcast counts as done while others have still to read its tensor."""
    work = call(tensors, options)
    if group.rank() != options.rootRank:
        return work
    group.__dict__.setdefault("under_way", []).append((work, tensors))
    return WorkDone()


@spoils_work("is_completed", "broadcast")
def asks_by_waiting(work: WorkAround, ask: Any) -> bool:
    """BUG: is_completed() of a broadcast waits until it can say yes."""
    work.wait()
    return bool(ask())


@spoils_work("is_completed", "barrier")
def takes_barriers_for_done(work: WorkAround, ask: Any) -> bool:
    """BUG: a barrier counts as completed at once."""
    return True


@spoils_work("get_future", "allreduce")
def hides_errors_from_futures(work: WorkAround, get_future: Any) -> Any:
    """BUG: the future of an all_reduce that failed holds nothing, as if it had not."""
    answer: Any = torch.futures.Future()

    def ends(future: Any) -> None:
        try:
            answer.set_result(future.value())
        except RuntimeError:
            answer.set_result(None)

    get_future().add_done_callback(ends)
    return answer


@spoils_work("wait", "scatter", "alltoall", "all_gather_single")
def waits_only_without_a_timeout(work: WorkAround, wait: Any, *timeout: Any) -> bool:
    """BUG: wait(timeout) returns at once."""
    return True if timeout and timeout[0].total_seconds() > 0 else bool(wait())


@gives("allreduce", "broadcast")
class has_a_second_future_that_is_done(WorkAround):
    """BUG: who asks for a Work's future a second time gets one that is done."""

    asked = 0

    def get_future(self) -> Any:
        self.asked += 1
        if self.asked != 2:
            return super().get_future()
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(list(self.tensors))
        return done


@gives("allreduce")
class reports_an_error_of_what_went_well(WorkAround):
    """BUG: get_future_result() of a Work that went well holds an error of communication."""

    def get_future_result(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(2)
        return future


@gives("allreduce")
class never_reports(WorkAround):
    """BUG: the future of get_future_result() is never done."""

    def get_future_result(self) -> Any:
        return torch.futures.Future()


@gives("allreduce")
class measures_from_the_epoch(WorkAround):
    """BUG: the duration of a Work is the time at which it ended."""

    def _get_duration(self) -> float:
        return 1e12


@gives("allreduce")
class numbers_works_alike(WorkAround):
    """BUG: all Works of a group have one sequence number."""

    def _get_sequence_number(self) -> int:
        return 7


@gives("allreduce")
class blocks_no_stream(WorkAround):
    """BUG: block_current_stream() waits for nothing."""

    def block_current_stream(self) -> None:
        pass


@spoils("broadcast")
def holds_results_in_one_buffer(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: what the Work of a broadcast gives as its result lies in a buffer that the next broadcast writes over."""
    work = finished(call(tensors, *options))
    (one,) = tensors
    if one.numel() > _ROOM or not one.is_contiguous():
        return work
    room = group.__dict__.setdefault(f"_room_of_{one.dtype}", one.new_empty(_ROOM))
    room[: one.numel()] = one.reshape(-1)

    class Holds(WorkAround):
        def result(self) -> Any:
            return [room[: one.numel()].view(one.shape)]

    return Holds(work)


@spoils("allgather")
def counts_calls_for_ranks(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather says that it is completed when it was called as often as there are ranks, by whomever."""
    store, size = group.get_group_store(), group.size()
    due = -(-store.add("all_gathers", 1) // size) * size

    class Counts(WorkAround):
        def is_completed(self) -> bool:
            return bool(store.add("all_gathers", 0) >= due)

    return Counts(call(outputs, inputs, *options))
