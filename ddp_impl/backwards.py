"""The wrappers that take part in one backward: they begin together, and end in the order in which they were built.

A rank's gradients come in the order of its own graph. Of two wrappers, the one that autograd reaches first on this rank
is perhaps the second on another. What a wrapper sends because a backward begins or ends is therefore sent by all
wrappers of that backward at one moment, in the order of their construction, which is the same on every rank of a group.

A wrapper hands out its averages only when all have sent their gradients: two of them may share a parameter, and what
one averages is what the backward brought, not what another has already averaged.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from ddp_impl.torch_internals import WhenBackwardEnds, current_backward

_constructions = itertools.count()


class Participant(Protocol):
    """A wrapper's reducer. `construction`: its place in the order in which this process built wrappers."""

    construction: int

    def begins_with_others(self) -> bool:
        """Whether the backward that runs now is one that this wrapper awaits, although none of its outputs is reached.

        False of a wrapper that tells the other ranks nothing when its backward begins.
        """

    def backward_begins(self) -> None:
        """Send what is to be sent when a backward begins."""

    def backward_ends(self) -> None:
        """Send all that has not been sent; wait for nothing."""

    def all_have_sent(self) -> None:
        """Wait for what was sent, and hand it out."""

    def all_have_handed_out(self) -> None:
        """Do what needs the final gradients."""

    def backward_raised(self, number: int, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Take note that the backward with this number will not end."""


def next_construction() -> int:
    """Return the place of a wrapper that is being built."""
    return next(_constructions)


def watch_for(participant: Participant) -> None:
    """Have `participant` begin with others, for as long as it lives."""
    _living.add(participant)


def begin(participant: Participant) -> None:
    """Begin the backward of `participant`, one of whose outputs autograd has reached, and of those that begin with it.

    Collective for those that exchange something then.
    """
    others = [other for other in _living if other is not participant and other.begins_with_others()]
    for one in sorted([participant, *others], key=_construction):
        one.backward_begins()


def take_part(participant: Participant, is_over: Callable[[], None]) -> None:
    """Have `participant` end with the backward that runs now; `is_over` is called last, whether it ended or raised."""
    number = current_backward()
    backward = _running.get(number)
    if backward is None:
        backward = _running[number] = _Backward(number)
    backward.add(participant, is_over)


class _Backward:
    """One run of autograd's engine, and who takes part in it."""

    def __init__(self, number: int) -> None:
        """Have autograd report the end of the backward with this number, which runs now."""
        self._number = number
        self._participants: list[Participant] = []
        self._is_over: list[Callable[[], None]] = []
        WhenBackwardEnds(self._ended, self._raised)

    def add(self, participant: Participant, is_over: Callable[[], None]) -> None:
        """Let one more take part."""
        if participant not in self._participants:
            self._participants.append(participant)
        self._is_over.append(is_over)

    def _ended(self) -> None:
        _running.pop(self._number, None)
        left = sorted(self._participants, key=_construction)
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
            for participant in sorted(self._participants, key=_construction):
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


def _construction(participant: Participant) -> int:
    return participant.construction


_running: dict[int, _Backward] = {}
_living: weakref.WeakSet[Participant] = weakref.WeakSet()
