"""Says on a rank that has waited long for the others what it waits for: while nothing has failed, nobody else would.

A rank that skips a batch, or a backward, leaves the others waiting until the group's timeout, half an hour over gloo.
One thread of the process looks at its waits now and then. Beginning and ending a wait cost an entry in a dictionary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

#: After how many seconds of waiting a rank speaks.
SLOW_S: Final = 30.0


@dataclass(slots=True)
class _Wait:
    """A wait since `begun` (of the monotonic clock), and what to do when it is slow, which is given its seconds."""

    speak: Callable[[float], None]
    begun: float = field(default_factory=time.monotonic)
    has_spoken: bool = False


class SlowWaits:
    """The waits of this process; those of one key end before another of it begins."""

    def __init__(self, slow_s: float = SLOW_S) -> None:
        """Speak of waits that last longer than `slow_s` seconds."""
        self._slow_s = slow_s
        self._waits: dict[object, _Wait] = {}
        self._watcher: threading.Thread | None = None

    def begin(self, key: object, speak: Callable[[float], None]) -> None:
        """Note a wait; `speak(seconds)` is called once, in another thread, if it is slow."""
        self._waits[key] = _Wait(speak)
        if self._watcher is None or not self._watcher.is_alive():  # it does not live on in a fork
            self._watcher = threading.Thread(target=self._watch, name="ddp_impl slow waits", daemon=True)
            self._watcher.start()

    def end(self, key: object) -> None:
        """Forget a wait."""
        self._waits.pop(key, None)

    def _watch(self) -> None:
        while True:
            time.sleep(self._slow_s / 4)
            now = time.monotonic()
            for wait in list(self._waits.values()):
                if not wait.has_spoken and now - wait.begun >= self._slow_s:
                    wait.has_spoken = True
                    wait.speak(now - wait.begun)
