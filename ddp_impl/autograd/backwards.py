"""The wrappers that take part in one backward: they begin together, send in one order, and end together.

A rank's gradients come in the order of its own graph. Of two wrappers, the one that autograd reaches first on this rank
is perhaps the second on another. What a wrapper sends because a backward begins or ends is therefore sent by all
wrappers of that backward at one moment, in the order of their construction, which is the same on every rank of a group.
Between the two, a wrapper sends a bucket when those that were built after it, which a backward mostly comes to first,
have sent all that they are sure to send. Where no wrapper expects ranks to differ (`find_unused_parameters`), none
waits for another: then gradients come in one order on all ranks.

A gradient of a parameter that a waiting wrapper shares with another, an output of which the backward has come to, is
the other's: the wrapper waits on, unless the backward comes to an output of its own. What a rank's backward comes to
besides is no business of the other ranks, which may run none.

A wrapper hands out its averages only when all have sent their gradients: two of them may share a parameter, and what
one averages is what the backward brought, not what another has already averaged.

Compiled autograd reports no end at which an error could be raised: it drops the callback. There each wrapper hands out
by itself, when its last gradient has come.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_impl.torch_internals.autograd import WhenBackwardEnds, current_backward, in_compiled_backward

Construction = tuple[int, ...]
_constructions = itertools.count()


class Participant(Protocol):
    """A wrapper's reducer.

    `construction`: its place in the order in which this process built wrappers; a copy stands behind what it is a copy
    of, because ranks may copy several wrappers in different orders. `group` and `device`: over what and with what it
    communicates. `in_company`: other wrappers may take part in its backwards, on every rank of the group alike.
    `ranks_may_differ`: ranks tell each other what they use, as it may not be the same.
    """

    construction: Construction
    in_company: bool
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup: ...  # noqa: D102

    @property
    def ranks_may_differ(self) -> bool: ...  # noqa: D102

    @property
    def last_backward(self) -> int | None:
        """The number of the backward that ended the last iteration; None while the wrapper awaits another."""

    @property
    def is_reached(self) -> bool:
        """Whether the backward that runs now is known to have come to an output of this wrapper's."""

    def begins_with_others(self, repeated: int | None) -> bool:
        """Whether the backward that runs now is one that this wrapper awaits, although none of its outputs is reached.

        `repeated`: the number of the backward that runs once more (`retain_graph=True`), if one does.
        """

    def has_more_to_send(self) -> bool:
        """Whether buckets are left that every rank knows to leave within the backward; waits until it knows."""

    def send_what_waits(self) -> None:
        """Send the buckets that waited for other wrappers of the backward."""

    def backward_begins(self) -> None:
        """Send what is to be sent when a backward begins."""

    def backward_ends(self) -> None:
        """Send all that has not been sent; wait for nothing."""

    def all_have_sent(self) -> None:
        """Wait for what was sent, and hand it out."""

    def all_have_handed_out(self) -> None:
        """Do what needs the final gradients."""

    def compiled_backward_ended(self) -> None:
        """Take note that a backward is over which compiled autograd ran; raise nothing."""

    def backward_raised(self, number: int, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Take note that the backward with this number will not end."""


def construction(copied: Construction) -> Construction:
    """Return the place of a wrapper that is being built, or made as a copy of the one at `copied`."""
    return (*copied, next(_constructions))


def others_live() -> bool:
    """Whether this process has a wrapper by now, as far as its garbage collector has come: that of no other rank."""
    return bool(_living)


def watch_for(participant: Participant) -> None:
    """Have `participant` begin with others, for as long as it lives."""
    _living.add(participant)


def keep_company(participant: Participant) -> None:
    """Have those that live be in company if `participant` is; called where all ranks know of it.

    They do when they have agreed on it, and when it runs a forward. Of a copy that one rank has made alone they do not.
    """
    if participant.in_company:
        for other in _living:
            other.in_company = True


def has_an_order(participant: Participant) -> bool:
    """Whether `participant` must begin and send in one order with others, as ranks may differ in what one uses.

    Not whether others live now: some rank keeps what the others have let go of, and a thread of a backend may hold what
    a backward needs for a moment longer. It stays so once several were there.
    """
    return participant.in_company and any(one.ranks_may_differ for one in _living)


def is_anothers(participant: Participant) -> bool:
    """Whether the backward that runs now is that of a wrapper other than `participant`, as far as it has come."""
    return any(one.is_reached for one in _living if one is not participant)


def takes_part(participant: Participant) -> bool:
    """Whether `participant` takes part in the backward that runs now, or in one within which that runs."""
    return any(participant in backward.participants for backward in _running.values())


def begin(participant: Participant) -> None:
    """Begin the backward of `participant`, one of whose outputs autograd has reached, and of those that begin with it.

    Collective for those that exchange something then.
    """
    joining = [participant]
    if has_an_order(participant):
        repeated = participant.last_backward
        others = [other for other in _living if other is not participant and other.begins_with_others(repeated)]
        joining = sorted([participant, *others], key=_construction)
    for one in joining:
        one.backward_begins()


def may_send(participant: Participant) -> bool:
    """Whether `participant` may send a bucket within the backward: all that were built after it have sent theirs."""
    rivals = _rivals(participant)
    return not any(one.construction > participant.construction and one.has_more_to_send() for one in rivals)


def has_sent(participant: Participant) -> None:
    """Have the others send what waited for `participant`, which has sent all that it is sure to send."""
    waiting = [one for one in _rivals(participant) if one.construction < participant.construction]
    for one in sorted(waiting, key=_construction, reverse=True):
        one.send_what_waits()


def _rivals(participant: Participant) -> list[Participant]:
    """Return the other wrappers of the backward whose buckets must not meet those of `participant`."""
    backward = next((one for one in _running.values() if participant in one.participants), None)
    if backward is None or len(backward.participants) == 1:
        return []
    rivals = [
        one
        for one in backward.participants
        if one is not participant and one.group is participant.group and one.device == participant.device
    ]
    return rivals if any(one.ranks_may_differ for one in (participant, *rivals)) else []


def join(participant: Participant, is_over: Callable[[], None], num_begun: int) -> Tally:
    """Have `participant` end with the backward that runs now; `is_over` is called last, whether it ended or raised.

    `num_begun`: how many collectives its group has begun by now. Returns the tally of the group's in this backward.
    """
    number = current_backward()
    backward = _running.get(number)
    if backward is None:
        backward = _running[number] = _Backward(number)
    backward.add(participant, is_over)
    return backward.tallies.setdefault((participant.group, participant.device), Tally(num_begun))


@torch.no_grad()
def end_alone(participant: Participant) -> None:
    """End the part of `participant` in a backward that compiled autograd runs: raise here, or nobody hears of it."""
    for step in (_send, _hand_out, _finish):
        step(participant)


@dataclass
class Tally:
    """How many collectives a group had begun before a backward, and how many of those since are the wrappers' own.

    `last`: how many it had begun before their last bucket left; None until one has. `num_come`: how many gradients have
    come to wrappers that learn from this backward, and how many buckets of others are full, as far as these expect the
    same ones on all ranks.
    """

    before: int = 0
    own: int = 0
    last: int | None = None
    num_come: int = 0


class _Backward:
    """One run of autograd's engine, and who takes part in it."""

    def __init__(self, number: int) -> None:
        """Have autograd report the end of the backward with this number, which runs now."""
        self._number = number
        self._is_compiled = in_compiled_backward()
        self.participants: list[Participant] = []
        self._is_over: list[Callable[[], None]] = []
        self.tallies: dict[tuple[dist.ProcessGroup, torch.device], Tally] = {}
        WhenBackwardEnds(self._ended, self._raised)

    def add(self, participant: Participant, is_over: Callable[[], None]) -> None:
        """Let one more take part."""
        if participant not in self.participants:
            self.participants.append(participant)
        self._is_over.append(is_over)

    def _ended(self) -> None:
        _running.pop(self._number, None)
        left = sorted(self.participants, key=_construction)
        errors: list[Exception] = []
        try:
            for step in (_send, _hand_out, _finish):
                for participant in list(left):
                    try:
                        step(participant)
                    except Exception as error:
                        left.remove(participant)
                        errors.append(error)
        finally:
            self._tell_over()
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"Another DistributedDataParallel of this backward raised, too: {other}")
            raise errors[0]

    def _raised(self, error: BaseException | None, traceback: TracebackType | None) -> None:
        _running.pop(self._number, None)
        try:
            for participant in sorted(self.participants, key=_construction):
                if self._is_compiled and traceback is None:
                    participant.compiled_backward_ended()
                else:
                    participant.backward_raised(self._number, error, traceback)
        finally:
            self._tell_over()

    def _tell_over(self) -> None:
        for is_over in self._is_over:
            is_over()


def _send(participant: Participant) -> None:
    participant.backward_ends()


def _hand_out(participant: Participant) -> None:
    participant.all_have_sent()


def _finish(participant: Participant) -> None:
    participant.all_have_handed_out()


def _construction(participant: Participant) -> Construction:
    return participant.construction


_running: dict[int, _Backward] = {}
_living: weakref.WeakSet[Participant] = weakref.WeakSet()
