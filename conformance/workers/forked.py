"""Forked processes: each can be signalled with its children, and none outlives its parent."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from conformance.surroundings.processes import processes

#: The environment variable by which /proc/<pid>/environ shows which zygote a process belongs to.
MARKER = "DDP_CONFORMANCE_DIRECTORY"

_PR_SET_PDEATHSIG = 1
#: A killed process is there for a moment: with its environment until the kernel has taken its memory.
_MOST_LOOKS = 100

_exit = os._exit  # a subject may have replaced that of the module when it is needed


class ForeignProcess:
    """A process that another one has forked and reaps, as far as it is like a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        """Hold the process; raises `ProcessLookupError` if it has ended."""
        self.pid = pid
        self._handle = os.pidfd_open(pid)  # its number may be another's as soon as it is reaped

    def poll(self) -> int | None:
        """Return None while it lives, and then 0: only its parent can read the exit status."""
        return 0 if wait([self._handle], 0) else None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended; raises `subprocess.TimeoutExpired`."""
        if not wait([self._handle], timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, sig)

    def kill(self) -> None:
        """Kill it, if it still lives."""
        self.send_signal(signal.SIGKILL)


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


def end_process(status: int) -> NoReturn:
    """End this process, whatever a subject has made of its streams.

    An error here would go on into the code that the process was forked from, as if it were that one: a zygote's child
    would end its siblings.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):  # it may be None, closed, or anything
                stream.flush()
    finally:
        _exit(status)


def kill_heirs(directory: str | Path, but: int | None = None) -> None:
    """Kill every process that belongs to the private directory of a zygote, by its environment; `but` not this one.

    Also one in a session of its own, which no signal to a group reaches, unless it was started with an environment that
    does not name the directory. Looks again until there is none, since one may start another meanwhile.
    """
    mark = f"{MARKER}={directory}".encode()
    for _ in range(_MOST_LOOKS):
        found = [pid for pid in _processes_with(mark) if pid != but]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes_with(variable: bytes) -> list[int]:
    found = []
    for folder in processes():
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def name_of_signal(signum: int) -> str:
    """Return e.g. `SIGKILL`; real-time signals but the first and the last have numbers only."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIGRTMIN+{signum - signal.SIGRTMIN}" if signum > signal.SIGRTMIN else f"signal {signum}"
