"""What a process does for those it forks: lets others signal each as a whole, and lets none outlive it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def lead_own_group(pid: int) -> None:
    """Put a forked process into its own process group. Parent and child both call it, to be sure."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the child did so first, and may have ended
        os.setpgid(pid, pid)


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to a process and the processes that it has started, if it still lives."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


def signal_main_thread(pid: int, signum: int) -> None:
    """Send a signal to the main thread of a process, if it still lives.

    The kernel may deliver a signal to a stopped process to any thread; the main thread would then go on while another
    thread handles the signal.
    """
    try:
        tgkill = ctypes.CDLL(None).tgkill
    except AttributeError:  # glibc before 2.30
        signal_group(pid, signum)
    else:
        tgkill(pid, pid, signum)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Whether the process is in state T (stopped by a signal) or t (by a debugger)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def name_of_signal(signum: int) -> str:
    """Return e.g. `SIGKILL`; real-time signals but the first and the last have numbers only."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIGRTMIN+{signum - signal.SIGRTMIN}" if signum > signal.SIGRTMIN else f"signal {signum}"
