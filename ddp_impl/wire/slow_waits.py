"""Logs on a rank that has waited long for the others what it waits for: while nothing has failed, nobody else would.

A rank that skips a batch, or a backward, leaves the others waiting until the group's timeout, half an hour over gloo.
One thread of the process looks at the ranks' waits a few times a second. It ends with the last wrapper, and by itself
when nobody has waited for a moment: a wrapper may live on for a while in circles of references. Beginning and ending a
wait cost the assignment of an attribute.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol

#: After how many seconds of waiting a rank logs it.
SLOW_S: Final = 30.0
#: How often the thread looks, and how long it goes on when nobody waits.
_PERIOD_S = 0.2
#: How long the thread may take to end with the last wrapper: what it logs at that moment.
_ENDS_WITHIN_S = 1.0

#: When a wait began (on the monotonic clock), in which phase, and for what, or a function that says it.
Wait = tuple[float, str, str | Callable[[], str]]


class Waiter(Protocol):
    """Who waits: `wait` is what for, None while it does not."""

    wait: Wait | None

    def log_slow_wait(self, wait: Wait, seconds: float) -> None:
        """Log a wait that has lasted so long; called once, in another thread."""


class SlowWaits:
    """Watches the waits of this process's waiters. `watcher`: the thread that does, None while there is none.

    Who begins a wait sets its attribute first and starts the watcher, if there is none, second.
    """

    def __init__(self, slow_s: float = SLOW_S) -> None:
        """Log waits that last longer than `slow_s` seconds."""
        self.watcher: threading.Thread | None = None
        self._slow_s = slow_s
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._num_served = 0
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_watcher)  # threads do not live on in a fork

    def add(self, waiter: Waiter) -> None:
        """Watch the waits of `waiter` for as long as it lives."""
        self._waiters.add(waiter)

    def serve(self, wrapper: object) -> None:
        """Keep the watcher for as long as `wrapper` lives, or another that is served."""
        self._num_served += 1
        weakref.finalize(wrapper, self._leave).atexit = False

    def start(self) -> None:
        """Start the watcher unless there is one."""
        with self._lock:
            if self.watcher is None:
                self._is_over.clear()
                self.watcher = threading.Thread(target=self._watch, name="ddp_impl slow waits", daemon=True)
                self.watcher.start()

    def _leave(self) -> None:
        self._num_served -= 1
        watcher = self.watcher
        if self._num_served == 0 and watcher is not None:
            self._is_over.set()
            if watcher is not threading.current_thread():
                watcher.join(_ENDS_WITHIN_S)

    def _forget_watcher(self) -> None:
        self.watcher, self._lock, self._is_over = None, threading.Lock(), threading.Event()

    def _watch(self) -> None:
        logged: list[tuple[Waiter, Wait]] = []
        idle_before = False
        while not self._is_over.wait(_PERIOD_S):
            now = time.monotonic()
            waiting = [(waiter, wait) for waiter in list(self._waiters) if (wait := waiter.wait) is not None]
            logged = [each for each in waiting if each in logged]
            for waiter, wait in waiting:
                if (waiter, wait) not in logged and now - wait[0] >= self._slow_s:
                    logged.append((waiter, wait))
                    waiter.log_slow_wait(wait, now - wait[0])
            if not waiting and idle_before:
                self.watcher = None
                # Who began to wait before this line saw a watcher there; who does later starts one.
                if any(waiter.wait for waiter in list(self._waiters)):
                    self.start()
                return
            idle_before = not waiting
        self.watcher = None
