"""What a process that forks others owes them: that each can be signalled as a whole, and that none outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def lead_own_group(pid: int) -> None:
    """Put a forked process into a process group of its own; in both processes: nobody then sees it otherwise."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has done so itself, and may be gone already
        os.setpgid(pid, pid)


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to a process and whatever it has started, if it still lives."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


def signal_main_thread(pid: int, signum: int) -> None:
    """Send a signal that the main thread of a process must handle, if it still lives.

    Of a process that is stopped, a signal to the whole may fall to any thread, which then handles it while the main
    thread goes on.
    """
    try:
        tgkill = ctypes.CDLL(None).tgkill
    except AttributeError:  # glibc before 2.30
        signal_group(pid, signum)
    else:
        tgkill(pid, pid, signum)


def die_with(parent: int) -> None:
    """Have the kernel kill this process, which `parent` has forked, when that one ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)
