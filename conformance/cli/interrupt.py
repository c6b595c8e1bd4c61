"""Ctrl-C: the first one ends the run; later ones must not interrupt the clean-up."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupted_once(then: str = "") -> Iterator[Callable[[], None]]:
    """Within the block, raise `KeyboardInterrupt` at the first SIGINT, SIGTERM or SIGHUP and ignore later ones.

    `then` says what the command does yet. A CI system sends SIGTERM to a job that it cancels, a closed terminal SIGHUP,
    and both want the partial report too. The block gets a function that ignores the first one, too, from then on.
    """

    def ignore() -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def stop(signum: int, frame: FrameType | None) -> None:
        ignore()
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\nStopping{then}.", file=sys.stderr, flush=True)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
