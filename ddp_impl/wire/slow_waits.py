"""Says on a rank that has waited long for the others what it waits for: while nothing has failed, nobody else would.

A rank that skips a batch, or a backward, leaves the others waiting until the group's timeout, half an hour over gloo.
One thread of the process looks at its waits a few times a second. It ends with the last wrapper, and by itself when
nobody has waited for a moment: a wrapper may live on for a while in circles of references. Beginning and ending a wait
cost an entry in a dictionary.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

#: After how many seconds of waiting a rank speaks.
SLOW_S: Final = 30.0
#: How often the thread looks, and how long it goes on when nobody waits.
_PERIOD_S = 0.2
#: How long the thread may take to end with the last wrapper: what it says at that moment.
_ENDS_WITHIN_S = 1.0


@dataclass(slots=True)
class _Wait:
    """A wait since `begun` (of the monotonic clock), and what to do when it is slow, which is given its seconds."""

    speak: Callable[[float], None]
    begun: float = field(default_factory=time.monotonic)
    has_spoken: bool = False


class SlowWaits:
    """The waits of this process; that of a waiter ends before it begins another."""

    def __init__(self, slow_s: float = SLOW_S) -> None:
        """Speak of waits that last longer than `slow_s` seconds."""
        self._slow_s = slow_s
        self._waits: dict[int, _Wait] = {}
        self._num_begun = self._num_served = 0
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None

    def serve(self, wrapper: object) -> None:
        """Watch waits for as long as `wrapper` lives, or another that is served."""
        self._num_served += 1
        weakref.finalize(wrapper, self._leave).atexit = False

    def _leave(self) -> None:
        self._num_served -= 1
        watcher = self._watcher
        if self._num_served == 0 and watcher is not None:
            self._is_over.set()
            if watcher is not threading.current_thread():
                watcher.join(_ENDS_WITHIN_S)

    def begin(self, waiter: object, speak: Callable[[float], None]) -> None:
        """Note a wait; `speak(seconds)` is called once, in another thread, if it is slow."""
        with self._lock:
            self._waits[id(waiter)] = _Wait(speak)
            self._num_begun += 1
            if self._watcher is None or not self._watcher.is_alive():  # it does not live on in a fork
                self._is_over.clear()
                self._watcher = threading.Thread(target=self._watch, name="ddp_impl slow waits", daemon=True)
                self._watcher.start()

    def end(self, waiter: object) -> None:
        """Forget a wait."""
        self._waits.pop(id(waiter), None)

    def _watch(self) -> None:
        num_before = -1
        while not self._is_over.wait(_PERIOD_S):
            now = time.monotonic()
            for wait in list(self._waits.values()):
                if not wait.has_spoken and now - wait.begun >= self._slow_s:
                    wait.has_spoken = True
                    wait.speak(now - wait.begun)
            with self._lock:
                if not self._waits and self._num_begun == num_before:
                    self._watcher = None
                    return
                num_before = self._num_begun
        self._watcher = None
