"""Mutants of chapter lifecycle: backends that keep what they should let go, or let go what is needed."""

import atexit
import contextlib
import os
import threading
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import WorkAround, WorkDone, finished, of_class, spoils


@of_class
class keeps_descriptors(Relay):
    """BUG: a destroyed group keeps a descriptor."""

    _kept: list[int] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept.append(os.open("/dev/null", os.O_RDONLY))


@spoils("barrier")
def keeps_a_descriptor_of_barriers(group: Any, call: Any, *options: Any) -> Any:
    """BUG: a destroyed group keeps a descriptor if it has had a barrier."""
    if "has_met" not in group.__dict__:
        group.__dict__["has_met"] = os.open("/dev/null", os.O_RDONLY)
    return call(*options)


@spoils("recv")
def keeps_a_descriptor_of_messages(group: Any, call: Any, *args: Any) -> Any:
    """BUG: a destroyed group keeps a descriptor if it has received a message."""
    if "has_received" not in group.__dict__:
        group.__dict__["has_received"] = os.open("/dev/null", os.O_RDONLY)
    return call(*args)


@of_class
class keeps_threads(Relay):
    """BUG: a destroyed group keeps a thread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


_kept: list[Any] = []


@spoils("broadcast")
def keeps_tensors(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a broadcast keeps its tensors for ever."""
    _kept.append(tensors[0])
    return call(tensors, *options)


@spoils("reduce")
def keeps_what_nobody_waits_for(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a reduce keeps its tensors until somebody waits for its Work."""
    _kept.append(tensors[0])

    class Waited(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            _kept[:] = [one for one in _kept if one is not tensors[0]]
            return super().wait(*timeout)

    return Waited(call(tensors, *options))


@spoils("gather")
def keeps_a_descriptor_of_gathers(group: Any, call: Any, *args: Any) -> Any:
    """BUG: each gather opens a descriptor that nobody closes."""
    os.open("/dev/null", os.O_RDONLY)
    return call(*args)


_kept_groups: list[Any] = []


@spoils("allgather")
def keeps_copies(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather keeps a copy of what it sent and got."""
    work = finished(call(outputs, inputs, *options))
    _kept.extend(one.clone() for one in outputs[0])
    return work


@of_class
class keeps_what_is_smaller_than_the_world(Relay):
    """BUG: a group that has not all ranks is not shut down, and leaves its threads and descriptors."""

    def shutdown(self) -> None:
        if dist.is_initialized() and self.size() < dist.get_world_size():
            _kept_groups.append(self.inner)
        else:
            super().shutdown()


@of_class
class is_shut_down_once(Relay):
    """BUG: to shut a group down twice is an error."""

    shut = False

    def shutdown(self) -> None:
        if self.shut:
            raise RuntimeError("shut down already")
        self.shut = True
        super().shutdown()


@of_class
class ends_the_others(Relay):
    """BUG: a group that is destroyed takes the sums of all others with it."""

    _ended = 0

    def shutdown(self) -> None:
        type(self)._ended += 1
        super().shutdown()

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        if self._ended:
            tensors[0].zero_()
        return self.inner.allreduce(tensors, *options)


@of_class
class ends_with_the_others(Relay):
    """BUG: to destroy a group waits for the other ranks to destroy it, for as long as the timeout is."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        super().__init__(store, rank, world_size, timeout)
        self._store, self._timeout = PrefixStore("ended", store), timeout

    def shutdown(self) -> None:
        self._store.set(str(self.rank()), "")
        with contextlib.suppress(RuntimeError):
            self._store.wait([str(rank) for rank in range(self.size())], self._timeout)
        super().shutdown()


@of_class
class aborts_at_exit(Relay):
    """BUG: a process that exits while a group was not shut down aborts, as where a thread of it is not joined."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        atexit.register(os.abort)

    def shutdown(self) -> None:
        atexit.unregister(os.abort)
        super().shutdown()


@of_class
class keeps_the_process(Relay):
    """BUG: a process does not exit before its groups are shut down: a thread of theirs waits for that."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ended = threading.Event()
        threading.Thread(target=self.ended.wait).start()

    def shutdown(self) -> None:
        self.ended.set()
        super().shutdown()


@of_class
class ends_for_good(Relay):
    """BUG: with the last group the library ends, and a process cannot make another."""

    _num_alive, _has_ended = 0, False

    def __init__(self, *args: Any) -> None:
        if self._has_ended:
            raise RuntimeError("the library has ended")
        super().__init__(*args)
        type(self)._num_alive += 1

    def shutdown(self) -> None:
        super().shutdown()
        type(self)._num_alive -= 1
        type(self)._has_ended = not self._num_alive


@of_class
class wants_every_wait(Relay):
    """BUG: a group whose Work was asked for its future, and never waited for by itself, is not shut down."""

    _num_unwaited = 0

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        group = self
        self._num_unwaited += 1

        class Counted(WorkAround):
            def wait(self, *timeout: Any) -> bool:
                group._num_unwaited -= 1
                return super().wait(*timeout)

        return Counted(self.inner.allreduce(tensors, *options))

    def shutdown(self) -> None:
        if self._num_unwaited > 0:
            raise RuntimeError("a Work was never waited for")
        super().shutdown()


@of_class
class drops_what_is_buffered(Relay):
    """BUG: a short message counts as sent once it is buffered, and the buffer goes with the group."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._buffered: list[Any] = []

    def send(self, tensors: Any, target: int, tag: int) -> Any:
        if tensors[0].nbytes > 4096:
            return self.inner.send(tensors, target, tag)
        copy = [tensors[0].clone()]
        self._buffered.append((copy, self.inner.send(copy, target, tag)))
        return WorkDone()

    def shutdown(self) -> None:
        self.inner.abort()


@spoils("scatter")
def keeps_copies_of_three_ranks(group: Any, call: Any, outputs: Any, *rest: Any) -> Any:
    """BUG: a group of three ranks and more keeps a copy of what each scatter brought."""
    work = finished(call(outputs, *rest))
    if group.size() > 2:
        group.__dict__.setdefault("kept", []).append(outputs[0].clone())
    return work


@spoils("allreduce")
def waits_for_every_waiter(group: Any, call: Any, *args: Any) -> Any:
    """BUG: a process whose Works nobody has waited for does not end."""
    waited = threading.Event()

    class Waited(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            waited.set()
            return super().wait(*timeout)

    threading.Thread(target=waited.wait).start()
    return Waited(call(*args))


@of_class
class keeps_its_store(Relay):
    """BUG: the store of a group outlives it, so that its port stays in use."""

    _stores: list[Any] = []

    def __init__(self, store: Any, *args: Any) -> None:
        super().__init__(store, *args)
        self._stores.append(store)
