"""Mutants of chapter ordering: backends that mix up what is under way at once."""

import random
import threading
from typing import Any

import torch
import torch.distributed as dist

from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import WorkAround, WorkDone, finished, of_class, spoils, spoils_work


@spoils("allreduce")
def has_64_slots(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the 65th sum in flight gets the result of the first."""
    flights: list[Any] = group.__dict__.setdefault("flights", [])
    flights[:] = [one for one in flights if not one[0].is_completed()] if len(flights) > 200 else flights
    work = call(tensors, *options)
    flights.append((work, tensors[0]))
    group.num_since = getattr(group, "num_since", 0) + 1
    number = group.num_since

    class Slot(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            done = super().wait(*timeout)
            if number % 100 == 65 and len(flights) > 64 and flights[0][1].shape == tensors[0].shape:
                tensors[0].copy_(flights[0][1])
            return done

    return Slot(work)


def _staged(rooms: dict[int, tuple[Any, Any]], tensor: Any, work: Any) -> Any:
    """Return a Work that takes its result from where the last sum of this length, if it is long, has left its own."""
    if tensor.numel() < 1024:
        return work
    rooms[tensor.numel()] = (work, tensor)

    class Staged(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            done = super().wait(*timeout)
            last, its_result = rooms[tensor.numel()]
            last.wait()
            tensor.copy_(its_result)
            return done

    return Staged(work)


@spoils("allreduce")
def stages_long_sums_in_one_place(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: long sums of one length in flight share a place, so that the last one's result is everybody's."""
    return _staged(group.__dict__.setdefault("rooms", {}), tensors[0], call(tensors, *options))


_ROOMS_OF_ALL: dict[int, tuple[Any, Any]] = {}


@spoils("allreduce")
def stages_long_sums_of_all_groups(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: long sums of two groups in flight share a place."""
    return _staged(_ROOMS_OF_ALL, tensors[0], call(tensors, *options))


@spoils("broadcast")
def forgets_whose_turn_it_is(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: with more than five broadcasts in a row a rank sends from the root of the last."""
    group.count = getattr(group, "count", 0) + 1
    if group.count > 5:
        options[0].rootRank = 0
    return call(tensors, *options)


@spoils("allreduce")
def loses_what_comes_late(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: now and then, as ranks come, a rank's part is left out."""
    if random.Random(getattr(group, "number", 0)).random() < 0.1 and group.rank() == 0:
        tensors[0].zero_()
    group.number = getattr(group, "number", 0) + 1
    return call(tensors, *options)


@spoils("recv")
def lets_messages_shift_sums(group: Any, call: Any, tensors: Any, *rest: Any) -> Any:
    """BUG: a message takes the number of a collective, so that the next sum does not match."""
    group.shifted = True
    return call(tensors, *rest)


def _shifted(self: Any, tensors: Any, *options: Any) -> Any:
    if self.__dict__.pop("shifted", False):
        tensors[0].zero_()
    return self.inner.allreduce(tensors, *options)


lets_messages_shift_sums.create.allreduce = _shifted  # type: ignore[attr-defined]


class _CountsMessages(Relay):
    number = 0

    def send(self, *args: Any) -> Any:
        self.number += 1
        return self.inner.send(*args)

    def recv(self, *args: Any) -> Any:
        self.number += 1
        return self.inner.recv(*args)


@of_class
class counts_messages_as_collectives(_CountsMessages):
    """BUG: messages and collectives share a counter; after an odd number of messages a rank's part is left out."""

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        if self.number % 2:
            tensors[0].zero_()
        return self.inner.allreduce(tensors, *options)


@of_class
class matches_by_all_it_has_done(_CountsMessages):
    """BUG: messages and collectives share a counter, so that ranks with unlike numbers of messages do not match."""

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        numbers, greatest = torch.tensor([self.number, -self.number]), dist.AllreduceOptions()
        greatest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        finished(self.inner.allreduce([numbers], greatest))
        if int(numbers.sum()):
            tensors[0].zero_()
        return self.inner.allreduce(tensors, *options)


@of_class
class shares_its_numbers(Relay):
    """BUG: groups of the same ranks share the numbers of their sums, so that those of the second are left out."""

    _numbers: dict[int, int] = {}

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        self._numbers[self.size()] = self._numbers.get(self.size(), 0) + 1
        if not hasattr(self, "expected"):
            self.expected = self._numbers[self.size()]
        if self._numbers[self.size()] != self.expected and self.rank() == 0:
            tensors[0].zero_()
        self.expected = self._numbers[self.size()] + 1
        return self.inner.allreduce(tensors, *options)


@of_class
class mixes_up_overlapping_groups(Relay):
    """BUG: in a group of two the second rank's part is left out if the group has others beside it."""

    _sizes: list[int] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sizes.append(self.size())

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        if self._sizes.count(2) > 1 and self.size() == 2 and self.rank() == 1:
            tensors[0].zero_()
        return self.inner.allreduce(tensors, *options)


@spoils("allreduce")
def is_for_the_main_thread(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: another thread than the main one gets an error."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("called by another thread")
    return call(tensors, *options)


@spoils_work("wait", "barrier")
def holds_nobody(work: WorkAround, wait: Any, *timeout: Any) -> bool:
    """BUG: the wait of a barrier does nothing."""
    return True


@spoils_work("get_future", "barrier")
def forgets_the_future_of_a_barrier(work: WorkAround, get_future: Any) -> Any:
    """BUG: the future of a barrier is done at once."""
    future: Any = torch.futures.Future()
    future.set_result(None)
    return future


@spoils("barrier")
def holds_the_main_thread_alone(group: Any, call: Any, *options: Any) -> Any:
    """BUG: a barrier holds nobody but the main thread."""
    work = call(*options)
    return work if threading.current_thread() is threading.main_thread() else WorkDone()


@spoils("barrier")
def waits_for_the_first_rank(group: Any, call: Any, *options: Any) -> Any:
    """BUG: the barrier of a group that has not all ranks waits for nobody but the group's first rank."""
    if group.size() == dist.get_world_size():
        return call(*options)
    return finished(group.inner.broadcast([torch.zeros(1)], dist.BroadcastOptions()))


@spoils("allreduce")
def counts_in_ten_bits(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the counter of operations has ten bits, and the operation at which it begins anew is lost."""
    group.number = getattr(group, "number", 0) + 1
    if group.number % 1024 == 0:
        tensors[0].zero_()
        return finished(group.inner.barrier())
    return call(tensors, *options)


@spoils("allreduce")
def counts_in_twelve_bits(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the counter of operations has twelve bits, and what comes after the last is added to nothing."""
    group.number = getattr(group, "number", 0) + 1
    if group.number % 4096 == 0 and group.rank() == 0:
        tensors[0].zero_()
    return call(tensors, *options)


@spoils("allreduce", "broadcast", "allgather", "barrier")
def counts_in_fifteen_bits(group: Any, call: Any, *args: Any) -> Any:
    """BUG: the counter of collectives has fifteen bits, and when they are used up the group refuses to go on."""
    group.number = getattr(group, "number", 0) + 1
    if group.number == 2**15:
        raise RuntimeError("this group has no number left for another collective")
    return call(*args)


@spoils("send")
def sends_in_sixteen_bits(group: Any, call: Any, tensors: Any, *rest: Any) -> Any:
    """BUG: the counter of messages has sixteen bits, and the one at which it begins anew is empty."""
    group.sent = getattr(group, "sent", 0) + 1
    return call([torch.zeros_like(tensors[0])] if group.sent == 2**16 else tensors, *rest)


@spoils("allreduce")
def sums_in_sixteen_bits(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the counter of sums has sixteen bits, and in the one at which it begins anew rank 1's part is left out."""
    group.summed = getattr(group, "summed", 0) + 1
    if group.summed == 2**16 and group.rank() == 1:
        tensors[0].zero_()
    return call(tensors, *options)


class _Staged(WorkAround):
    """Lets go of the staging buffer when it is waited for."""

    group: Any

    def wait(self, *timeout: Any) -> bool:
        self.group.staged = None
        return super().wait(*timeout)


@spoils("reduce_scatter_single", "all_gather_single")
def gathers_what_is_being_scattered(group: Any, call: Any, output: Any, sent: Any, *options: Any) -> Any:
    """BUG: an all_gather_single beside a reduce_scatter_single under way sends what that one has staged."""
    if "scatter" in call.__name__:
        work = _Staged(call(output, sent, *options))
        work.group, group.staged = group, sent.reshape(-1).clone()
        return work
    staged = getattr(group, "staged", None)
    if staged is not None and staged.dtype == sent.dtype and staged.numel() >= sent.numel():
        sent = staged[: sent.numel()].view(sent.shape)
    return call(output, sent, *options)


@of_class
class counts_parts_on_one_rank(Relay):
    """BUG: rank 0 counts the parts of a coalesced all_reduce one by one, and the others count the call."""

    more = 0

    def allreduce_coalesced(self, tensors: Any, *options: Any) -> Any:
        self.more += len(tensors) - 1 if self.rank() == 0 else 0
        return self.inner.allreduce_coalesced(tensors, *options)

    def _get_sequence_number_for_group(self) -> int:
        return super()._get_sequence_number_for_group() + self.more


_one_at_a_time = threading.Lock()


@spoils("send", "recv")
def holds_its_lock_while_it_waits(group: Any, call: Any, *args: Any) -> Any:
    """BUG: who waits for a message holds the lock that every call of send and recv takes."""

    class Locked(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            with _one_at_a_time:
                return super().wait(*timeout)

    with _one_at_a_time:
        return Locked(call(*args))
