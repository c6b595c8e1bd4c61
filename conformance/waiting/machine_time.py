"""A clock that stands still while this machine does, by which the harness measures how long peers may be silent.

When a virtual machine is paused or a container frozen, no peer can answer, and afterwards every deadline would have
passed at once. So a wait consists of short turns, and if it is woken much later than requested, the time between does
not count. Nor does, where a verdict depends on it, time in which this process did something else.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from conformance.waiting.limits import LATE_S, TURN_S

Found = TypeVar("Found")

#: So many stops are known one by one. Of a moment before them all only one thing matters, that it is long ago.
_MOST_STOPS = 1000

_stops: list[tuple[float, float]] = []  # from, until, by `time.monotonic`; in order, none within another
_stopped_s = 0.0  # in these and in earlier stops
_listened_at = math.inf  # when a thread of this process last ended a turn of waiting
_lock = threading.Lock()


def now() -> float:
    """Return the present moment in seconds; only differences mean something."""
    return moment(time.monotonic())


def moment(monotonic_s: float) -> float:
    """Return a moment of this machine's monotonic clock, not later than the present one, by this clock."""
    with _lock:
        stopped_s = _stopped_s
        for start, end in reversed(_stops):  # none, where the moment is the present one
            if end <= monotonic_s:
                break
            stopped_s -= end - max(start, monotonic_s)
        return monotonic_s - stopped_s


def resume() -> None:
    """Do not count the time since any thread of this process last listened, or was to, if that is long.

    Call it where a deadline may be found to have passed that nobody has listened until. Several threads may meet the
    same stop.
    """
    global _stopped_s, _listened_at
    with _lock:
        start = max(_listened_at, _stops[-1][1]) if _stops else _listened_at
        _listened_at = woke = time.monotonic()
        if woke - start > LATE_S:
            _stops.append((start, woke))
            _stopped_s += woke - start
        if len(_stops) > _MOST_STOPS:
            _stops.pop(0)


def sleeps(seconds: float) -> float:
    """Return for how long to sleep who wants to sleep for so many seconds: the clock is looked at again after that."""
    global _listened_at
    turn_s = max(0.0, min(TURN_S, seconds))
    with _lock:
        _listened_at = time.monotonic() + turn_s
    return turn_s


def wait_for(look: Callable[[float | None], Found], timeout_s: float | None) -> Found:
    """Return what `look` finds, or the nothing that it returns when `timeout_s` have passed by this clock.

    `look` is given the seconds, at most `TURN_S`, in which it is to return, sooner if it finds something; None for a
    `timeout_s` of None.
    """
    if timeout_s is None:
        return look(None)
    until = now() + timeout_s
    while True:
        found = look(sleeps(until - now()))
        resume()
        if found or now() >= until:
            return found
