"""Ctrl-C, once: the first ends the run, the following ones do not disturb the clearing up."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Within the block, raise `KeyboardInterrupt` at the first SIGINT or SIGTERM and ignore later ones.

    SIGTERM is what a CI system sends to a job that it cancels; the partial report matters there as well.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("\nStopping; the report will hold what is known so far.", file=sys.stderr)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
