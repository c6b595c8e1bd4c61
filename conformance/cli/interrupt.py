"""Ctrl-C: the first one ends the run; later ones must not interrupt the clean-up."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Within the block, raise `KeyboardInterrupt` at the first SIGINT or SIGTERM and ignore later ones.

    A CI system sends SIGTERM to a job that it cancels, and wants the partial report too.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("\nStopping; the report will hold the results so far.", file=sys.stderr)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
