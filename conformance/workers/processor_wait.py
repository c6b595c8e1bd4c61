"""`ProcessorWait`: for how long a busy machine kept processes waiting that had something to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable


class ProcessorWait:
    """How long threads of some processes were ready to run and got no processor, as Linux counts it.

    A rank that waits for another one, or for ever, is not ready to run: it waits for no processor.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        """Begin to count; tens of microseconds for each process."""
        self._before = {pid: _waits_ns(pid) for pid in pids}

    @property
    def seconds(self) -> float:
        """The longest wait of any thread since the beginning; 0 where the kernel does not count."""
        waits = (
            waited - before.get(thread, 0)
            for pid, before in self._before.items()
            for thread, waited in _waits_ns(pid).items()
        )
        return max(waits, default=0) / 1e9


def _waits_ns(pid: int) -> dict[str, int]:
    """Return what each thread has waited so far, by its number; nothing of threads that are gone."""
    waits: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has just ended, or nothing is counted
                waits[thread] = int(_text(f"/proc/{pid}/task/{thread}/schedstat").split()[1])
    return waits


def _text(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 128)
    finally:
        os.close(file)
