"""A clock that stands still while the machine does, by which the harness measures how long others may be silent.

A virtual machine is paused, a container frozen, a laptop closed: then nobody can answer, and afterwards every deadline
would have passed before anybody had the chance to. So who waits does so in short turns, and when it is woken much later
than it asked to be, the time in between does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

#: How long at most a wait goes on before the clock is looked at again.
TURN_S = 0.25
#: A process that is woken later than this could not listen; a busy machine wakes one that sleeps much sooner.
_LATE_S = 0.5

_stops: list[tuple[float, float]] = []  # from, until, by `time.monotonic`; in order, none within another
_lock = threading.Lock()


def now() -> float:
    """Return the present moment in seconds; only differences mean something."""
    return moment(time.monotonic())


def moment(monotonic_s: float) -> float:
    """Return a moment of this machine's monotonic clock, not later than the present one, by this clock."""
    return monotonic_s - sum(min(end, monotonic_s) - start for start, end in _stops if start < monotonic_s)


def wait_for(look: Callable[[float | None], Found], timeout_s: float | None) -> Found:
    """Return what `look` finds, or the nothing that it returns when `timeout_s` have passed by this clock.

    `look` is given the seconds, at most `TURN_S`, in which it is to return, sooner if it finds something; None for a
    `timeout_s` of None.
    """
    if timeout_s is None:
        return look(None)
    until = now() + timeout_s
    while True:
        turn_s = max(0.0, min(TURN_S, until - now()))
        due = time.monotonic() + turn_s
        found = look(turn_s)
        _woke(due)
        if found or now() >= until:
            return found


def _woke(due: float) -> None:
    """Note that a thread that wanted to be woken at `due` is awake; several threads may meet the same stop."""
    with _lock:
        woke = time.monotonic()
        start = max(due, _stops[-1][1]) if _stops else due
        if woke - start > _LATE_S:
            _stops.append((start, woke))
