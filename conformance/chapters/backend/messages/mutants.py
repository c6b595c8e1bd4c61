"""Mutants of chapter messages: backends that lose, swap, hold up or mistake messages."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from conformance.mutants.spoilt import WorkAround, WorkDone, finished, spoils, spoils_work


@spoils("recv")
def cuts_long_messages(group: Any, call: Any, tensors: Any, source: int, tag: int) -> Any:
    """BUG: of a message of more than 60,000 elements the end does not arrive."""

    class Cut(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            done = super().wait(*timeout)
            if tensors[0].numel() > 60_000:
                tensors[0].view(-1)[60_000:] = -1
            return done

    return Cut(call(tensors, source, tag))


@spoils("send")
def sends_no_empty_message(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: a message of no elements is not sent."""
    return call(tensors, peer, tag) if tensors[0].numel() else WorkDone()


@spoils("recv")
def swaps_two_messages(group: Any, call: Any, tensors: Any, source: int, tag: int) -> Any:
    """BUG: of two messages from one rank the second takes the place of the first."""
    pending: dict[int, Any] = group.__dict__.setdefault("pending", {})
    first = pending.pop(source, None)
    if first is None or first[0].shape != tensors[0].shape:
        pending[source] = (tensors[0], call(tensors, source, tag))
        return pending[source][1]

    class Swaps(WorkAround):
        swapped = False

        def wait(self, *timeout: Any) -> bool:
            done = super().wait(*timeout)
            if not self.swapped:
                self.swapped = True
                kept = first[0].clone()
                first[0].copy_(tensors[0])
                tensors[0].copy_(kept)
            return done

    return Swaps(call(tensors, source, tag))


@spoils("send", "recv")
def ignores_tags(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: tags are ignored."""
    return call(tensors, peer, 0)


@spoils("send", "recv")
def reads_two_bytes_of_tags(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: of a tag the low 16 bits count."""
    return call(tensors, peer, tag % 2**16)


@spoils("recv")
def takes_great_tags_from_anybody(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: a receive with a tag above 255 takes the first message of that tag, whoever sent it."""
    return group.inner.recv_anysource(tensors, tag) if tag > 255 else call(tensors, peer, tag)


@spoils("send", "recv")
def ignores_tags_of_long_messages(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: messages of 64 KiB and more, which ask the receiver first, have no tag."""
    (tensor,) = tensors
    return call(tensors, peer, 0 if tensor.numel() * tensor.element_size() >= 2**16 else tag)


@spoils_work("_source_rank", "recv_anysource")
def names_rank_zero(work: WorkAround, source_rank: Any) -> int:
    """BUG: a message from anybody is said to be from rank 0."""
    return 0


@spoils("recv_anysource")
def names_rank_zero_for_tags(group: Any, call: Any, tensors: Any, tag: int) -> Any:
    """BUG: a message with a tag from anybody is said to be from rank 0."""

    class OfRankZero(WorkAround):
        def _source_rank(self) -> int:
            return 0

    return OfRankZero(call(tensors, tag)) if tag else call(tensors, tag)


@spoils_work("wait", "recv_anysource")
def takes_int32_for_float32(work: WorkAround, wait: Any, *timeout: Any) -> bool:
    """BUG: a message of int32 from anybody is taken for one of float32, and converted."""
    done = bool(wait(*timeout))
    (tensor,) = work.tensors
    if tensor.dtype is torch.int32:
        tensor.copy_(tensor.view(torch.float32))
    return done


@spoils_work("_source_rank", "recv_anysource")
def names_rank_one_to_rank_zero(work: WorkAround, source_rank: Any) -> int:
    """BUG: rank 0 is told that each message from anybody is from rank 1."""
    return source_rank() if dist.get_rank() else 1


@spoils_work("is_completed", "recv_anysource")
def says_that_somebody_has_sent(work: WorkAround, is_completed: Any) -> bool:
    """BUG: a receive from anybody says that it is completed as soon as it is asked for."""
    return True


@spoils("recv_anysource")
def has_the_next_message_at_once(group: Any, call: Any, tensors: Any, tag: int) -> Any:
    """BUG: the future of a receive from anybody is done as soon as it is asked for, but for the first one."""
    number = group.__dict__["num_asked"] = group.__dict__.get("num_asked", 0) + 1

    class Done(WorkAround):
        def get_future(self) -> Any:
            future: Any = torch.futures.Future()
            if number > 1:
                future.set_result(tensors)
            return future

    return Done(call(tensors, tag))


@spoils("send")
def dies_of_itself(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: a message to oneself ends the process."""
    if peer == group.rank():
        os.kill(os.getpid(), signal.SIGSEGV)
    return call(tensors, peer, tag)


@spoils("send")
def sends_when_asked(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: isend waits for its peer."""
    return finished(call(tensors, peer, tag))


@spoils("send")
def sends_the_33rd_when_asked(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: isend waits for its peer while 32 messages are under way."""
    sent: list[Any] = group.__dict__.setdefault("sent", [])
    work = call(tensors, peer, tag)
    sent.append(work)
    if len(sent) > 32:
        sent.pop(0).wait()
    return work


@spoils("recv")
def receives_at_once(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: irecv waits for its message, so that ranks that receive first wait for each other."""
    return finished(call(tensors, peer, tag))


@spoils("recv")
def overwrites_the_third(group: Any, call: Any, tensors: Any, source: int, tag: int) -> Any:
    """BUG: every third message from a rank comes out as zeros."""
    counts: dict[int, int] = group.__dict__.setdefault("counts", {})
    counts[source] = counts.get(source, 0) + 1
    number = counts[source]

    class Third(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            done = super().wait(*timeout)
            if number % 3 == 0:
                tensors[0].zero_()
            return done

    return Third(call(tensors, source, tag))


@spoils("recv")
def waits_for_the_oldest(group: Any, call: Any, tensors: Any, source: int, tag: int) -> Any:
    """BUG: whichever receive is waited for, the oldest is taken for done, and what was waited for is not written."""
    pending: list[Any] = group.__dict__.setdefault("queue", [])
    room = tensors[0].clone()
    work = call([room], source, tag)
    pending.append((work, room))

    class Oldest(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            oldest, held = pending.pop(0) if pending else (work, room)
            oldest.wait()
            if held.shape == tensors[0].shape:  # messages without elements are on their way, too
                tensors[0].copy_(held)
            return True

    return Oldest(work)


def _forgets_what_waited(self: Any, tensors: Any, peer: int, tag: int) -> Any:
    self.waiting = []
    return self.inner.recv(tensors, peer, tag)


@spoils("send")
def has_room_for_32(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: more than 32 messages to a rank, with none received between, are refused."""
    group.num_sent = getattr(group, "num_sent", 0) + 1
    if group.num_sent > 32 and tensors[0].numel() > 60_000:
        raise RuntimeError("too many messages in flight")
    return call(tensors, peer, tag)


@spoils("send")
def keeps_256_messages(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: of more than 256 messages that nobody has asked for yet, the 257th is in the place of another."""
    group.waiting = [*getattr(group, "waiting", []), tensors[0]]
    late = group.waiting[-257] if len(group.waiting) > 256 else tensors[0]
    return call([late if late.shape == tensors[0].shape else tensors[0]], peer, tag)


keeps_256_messages.create.recv = _forgets_what_waited  # type: ignore[attr-defined]


@spoils_work("wait", "recv")
def received_too_early(work: WorkAround, wait: Any, *timeout: Any) -> bool:
    """BUG: a receive is done before its data is there."""
    return True


@spoils("send")
def sent_too_early(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: a send is done while its data is still read from the tensor."""
    work = call(tensors, peer, tag)
    group.__dict__.setdefault("under_way", []).append((work, tensors))

    class Done(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            return True

    return Done(work)


@spoils("send")
def keeps_eight_messages(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: a message of one size takes the memory of the eighth before it, which may not be received yet."""
    slots: dict[tuple[int, int], list[Any]] = group.__dict__.setdefault("slots", {})
    ring = slots.setdefault((peer, tensors[0].numel()), [])
    slot = ring.pop(0).copy_(tensors[0]) if len(ring) == 8 else tensors[0].clone()
    ring.append(slot)
    return call([slot], peer, tag)


@spoils("send")
def sends_in_its_wait(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: a message of more than 10,000 elements is sent when the sender waits for it, not before."""
    if tensors[0].numel() <= 10_000:
        return call(tensors, peer, tag)

    class Lazy(WorkDone):
        def wait(self, *timeout: Any) -> bool:
            return bool(finished(call(tensors, peer, tag)))

        def is_completed(self) -> bool:
            return False

    return Lazy()


@spoils("recv")
def counts_what_is_done(group: Any, call: Any, tensors: Any, source: int, tag: int) -> Any:
    """BUG: a receive says that it is completed when an all_reduce after it is."""
    number = group.__dict__.setdefault("num_summed", 0)

    class Counted(WorkAround):
        def is_completed(self) -> bool:
            return group.num_summed > number or super().is_completed()

    return Counted(call(tensors, source, tag))


def _counting(self: Any, tensors: Any, *options: Any) -> Any:
    work = finished(self.inner.allreduce(tensors, *options))
    self.num_summed = self.__dict__.get("num_summed", 0) + 1
    return work


counts_what_is_done.create.allreduce = _counting  # type: ignore[attr-defined]

_channels: dict[int, Any] = {}


@spoils("send", "recv")
def has_one_channel_for_the_same_ranks(group: Any, call: Any, tensors: Any, peer: int, tag: int) -> Any:
    """BUG: messages of all groups of as many ranks go through that which was the first to have one."""
    first = _channels.setdefault(group.size(), group.inner)
    return getattr(first, call.__name__)(tensors, peer, tag)


_posted: dict[int, Any] = {}


@spoils("recv")
def has_one_table_of_receives(group: Any, call: Any, tensors: Any, source: int, tag: int) -> Any:
    """BUG: of two receives that two groups have under way from one rank, each takes the other's message."""
    room, (earlier, owner) = tensors[0], _posted.pop(source, (None, None))
    swaps = earlier is not None and owner is not group and earlier.shape == room.shape
    if not swaps:
        _posted[source] = room, group

    class Posted(WorkAround):
        def wait(self, *timeout: Any) -> bool:
            done = super().wait(*timeout)
            _posted.pop(source, None)
            if swaps:
                kept = earlier.clone()
                earlier.copy_(room)
                room.copy_(kept)
            return done

    return Posted(call(tensors, source, tag))


@spoils("send")
def blocks_long_sends(group: Any, call: Any, tensors: Any, *rest: Any) -> Any:
    """BUG: isend of a MiB and more comes back only once the message is received."""
    work = call(tensors, *rest)
    if tensors[0].nbytes >= 2**20:
        work.wait()
    return work
