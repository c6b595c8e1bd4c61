"""The controller's handle of the zygote: starts it, asks it for ranks, and records how they ended.

Importing torch takes seconds of a processor. Controllers in forked processes share that: each has a branch, a zygote
that the first one has forked.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import IO, Protocol

import trio

from conformance.errors import ConformanceError
from conformance.surroundings.processes import is_stopped
from conformance.waiting import loop, machine_time
from conformance.waiting.limits import MOMENT_S, SHORT_DEADLINE_S, START_TIMEOUT_S
from conformance.workers.channel import Channel, MessageError, pair
from conformance.workers.forked import MARKER, ForeignProcess, kill_heirs, name_of_signal, signal_group
from conformance.workers.interpreter import start_interpreter
from conformance.workers.listener import connect
from conformance.workers.messages import (
    Ended,
    Forked,
    ForkPool,
    FromRank,
    FromZygote,
    Job,
    Preload,
    Preloaded,
    Seat,
    SignalRank,
)

#: glibc fills memory with 0x7f before a rank gets it: a DDP that reads what nobody has written finds large numbers (NaN
#: in half precision) and what counts as true, each time. Otherwise there may be zeros, by luck, or right values.
MEMORY_FILL = {"MALLOC_PERTURB_": "128"}
NO_MEMORY_FILL = {"MALLOC_PERTURB_": "0"}

_PREFIX = "ddp-conformance-"
#: Locked by the controller that a private directory belongs to.
_OWNER = "owner"
_OUTPUT = "zygote.output"


class ZygoteGoneError(ConformanceError):
    """The zygote has ended unexpectedly, or does not answer; its ranks are gone with it."""


class _Process(Protocol):
    """The process of a zygote; exit statuses are negative for signals, and None where only the parent can read them."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


class ZygoteProcess:
    """A zygote and the private directory that it shares with its ranks."""

    _process: _Process
    _lock: IO[bytes] | None = None

    def __init__(
        self, work_dir: Path | None, preload: tuple[str, ...], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the zygote and return at once; it forks ranks when it is `ready`.

        `environment` overrides the usual environment variables of ranks.
        """
        try:
            _remove_orphaned_directories(Path(work_dir or tempfile.gettempdir()))
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=work_dir))
            lock = _locked(directory / _OWNER)
        except OSError as error:
            raise ConformanceError(f"cannot make a private directory for the ranks: {error}") from error
        self._begin(directory, preload)
        self._lock = lock
        with open(self.directory / _OUTPUT, "wb") as output:
            self._process, self._channel = start_interpreter(
                "conformance.workers.zygote",
                str(self.directory),
                *preload,
                expects=FromZygote,
                environment={MARKER: str(self.directory), **MEMORY_FILL, **(environment or {})},
                output=output,
            )

    def _begin(self, directory: Path, modules: tuple[str, ...]) -> None:
        self.directory = directory
        self.gone = False
        self.end = ""  #: how the zygote ended of itself or was killed by others, such as `was killed by SIGKILL`
        self._creator = os.getpid()
        self._modules = frozenset(modules)  #: the modules that the zygote imports
        self._num_imports_pending = 1  #: requests to import that the zygote has not answered
        self._failure = ""
        self._pids: dict[tuple[int, int], int] = {}
        self._ended: dict[tuple[int, int], int] = {}
        self._pool_numbers = itertools.count()
        self._forked: dict[int, Forked] = {}
        self._waiters = trio.lowlevel.ParkingLot()  # tasks that wait while another task reads
        self._reader: trio.CancelScope | None = None  # of the task that reads

    def local(self) -> AbstractContextManager[ZygoteProcess]:
        """Return the zygote of the calling process: this one, which stays open; in a forked process another one.

        Leaving the block closes the other one, a branch or, where this one has ended, a new zygote. The parent must
        have waited for this one (`await_ready`), which the forked process must not use.
        """
        if os.getpid() == self._creator:
            return nullcontext(self)
        self._channel.close()  # the parent's: the zygote is to notice when that is gone
        try:
            return closing(Branch(self))
        except ZygoteGoneError:
            return closing(ZygoteProcess(self.directory.parent, tuple(self._modules)))

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have the zygote import `modules`, too, before it forks further ranks. Does not wait for it."""
        new = tuple(one for one in modules if one not in self._modules)
        if not new or self.gone:
            return
        try:
            self._channel.send(Preload(new))
        except OSError as error:
            self._lose(error)
        else:
            self._modules |= {*new}
            self._num_imports_pending += 1

    def new_pool(self) -> tuple[int, Path]:
        """Return the number and the directory of a new pool; the zygote must be `ready`."""
        number = next(self._pool_numbers)
        directory = self.directory / f"pool{number}"
        directory.mkdir()
        return number, directory

    def fork(self, seats: tuple[Seat, ...], timeout_s: float) -> tuple[tuple[int, ...], tuple[Channel, ...]]:
        """Fork one rank per seat of a pool; returns process ids and channels in the order of `seats`.

        Raises:
            ZygoteGoneError: the zygote has ended, or did not fork within `timeout_s` and was killed.
            ConformanceError: the kernel refused a process.

        """
        pool = seats[0].pool
        ours, theirs = zip(*(pair(FromRank, Job) for _ in seats), strict=True)
        deadline = machine_time.now() + timeout_s
        try:
            self._channel.send(ForkPool(seats), timeout_s, [channel.fileno() for channel in theirs])
            while pool not in self._forked:
                self._record(self._channel.receive(deadline - machine_time.now()))
        except (EOFError, OSError, MessageError) as error:
            self._lose(error)
            raise ZygoteGoneError(f"the ranks' zygote forked no ranks within {timeout_s:g} s: {error}") from error
        finally:
            for channel in theirs:
                channel.close()
        forked = self._forked.pop(pool)
        if forked.error:
            for channel in ours:
                channel.close()
            raise ConformanceError(
                f"cannot start {len(seats)} ranks: {forked.error}; give this user or container more processes"
                " (ulimit -u, pids.max) or memory"
            )
        pids = forked.pids
        self._pids.update(zip(((seat.pool, seat.rank) for seat in seats), pids, strict=True))
        return pids, ours

    def signal(self, seat: Seat, signum: int) -> None:
        """Send a signal to a rank and its children, if it lives; a rank does not outlive the zygote."""
        try:
            self._channel.send(SignalRank(seat.pool, seat.rank, signum))
        except OSError as error:
            self._lose(error)

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the zygote, which then neither forks nor reports deaths."""
        return not self.gone and is_stopped(self._process.pid)

    async def wait_for_report(self) -> None:
        """Wait until the zygote has reported something, or has ended. Several tasks may wait; one of them reads."""
        if self._reader is not None:
            await self._waiters.park()
            return
        try:
            with trio.CancelScope() as self._reader, contextlib.suppress(trio.ClosedResourceError):  # by `close`
                await trio.lowlevel.wait_readable(self._channel)
        finally:
            self._reader = None
            self._waiters.unpark_all()
        self.update()

    def update(self) -> None:
        """Record everything that the zygote has reported so far, including its own end. Does not wait."""
        try:
            while not self.gone and (message := self._channel.arrived()) is not None:
                self._record(message)
        except (EOFError, OSError, MessageError) as error:
            self._lose(error)

    def exit_status(self, seat: Seat) -> int | None:
        """Return the exit status of a rank (negative for a signal), None while it lives, as of the last `update`."""
        return self._ended.get((seat.pool, seat.rank))

    def close(self) -> None:
        """End the zygote, its ranks and what these have started; none of them is left when this returns.

        But a process survives whose environment does not name the private directory, as where a subject has cleared it.
        """
        self.update()
        if not self.gone and (self._num_imports_pending or self.is_stopped):
            self._kill()  # it would notice the closed connection only after its imports, or never
        with contextlib.suppress(RuntimeError):  # no loop runs in which somebody could wait for it
            trio.lowlevel.notify_closing(self._channel)
        self._channel.close()
        self.gone = True
        try:
            self._process.wait(SHORT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._kill()
        kill_heirs(self.directory)  # a zygote that was killed has left them
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def await_ready(self) -> None:
        """Do what `ready` does, where no loop runs."""
        loop.run(self.ready)

    async def ready(self) -> None:
        """Wait until the zygote has imported everything; raises `ConformanceError` if it could not."""
        with trio.move_on_after(START_TIMEOUT_S) as waiting:
            while self._num_imports_pending and not self._failure and not self.gone:
                await self.wait_for_report()
        if waiting.cancelled_caught:
            stopped = ": a signal has stopped it" if self.is_stopped else ""
            self._failure = f"the ranks' zygote did not start within {START_TIMEOUT_S:.0f} s{stopped}"
        if self.gone and self._num_imports_pending and not self._failure:
            output = (self.directory / _OUTPUT).read_text(errors="replace")
            self._failure = f"the ranks' zygote died while it was starting:\n{output}"
        if self._failure:
            raise ConformanceError(self._failure)

    def _record(self, message: FromZygote) -> None:
        match message:
            case Ended(pool, rank, status):
                self._ended[pool, rank] = status
            case Forked():
                self._forked[message.pool] = message
            case Preloaded(error):
                self._num_imports_pending -= 1
                if error:
                    self._failure = f"the ranks' zygote could not import what ranks need:\n{error}"
        self._waiters.unpark_all()
        if self._reader is not None:
            self._reader.cancel()  # `fork` or `update` has read in its place

    def _lose(self, error: Exception) -> None:
        """Note that the zygote is of no use any more; it may still be there, stopped for example."""
        if self.gone:
            return
        self.gone = True
        if isinstance(error, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it lives, and has closed its connection
                status = self._process.wait(MOMENT_S)
                self.end = "" if status is None else _described(status)
        if not self._num_imports_pending and self._process.poll() is None:
            why = (
                "a signal has stopped it" if is_stopped(self._process.pid) else str(error) or "it closed its connection"
            )
            logging.getLogger(__name__).warning("The ranks' zygote does not answer (%s); it is replaced.", why)
        self._kill()

    def _kill(self) -> None:
        """Kill the zygote, its ranks and the processes that these have started, without its help."""
        self._process.send_signal(signal.SIGSTOP)  # it reaps no rank from here on, so that their ids stay theirs
        with contextlib.suppress(EOFError, OSError, MessageError):
            while (message := self._channel.arrived()) is not None:
                self._record(message)
        for place, pid in self._pids.items():
            if place not in self._ended:
                signal_group(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()


def _locked(path: Path) -> IO[bytes]:
    """Return a file that is locked for as long as this process lives, or one that it has forked.

    Raises `OSError` if another process has locked it.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _remove_orphaned_directories(parent: Path) -> None:
    """Remove private directories of controllers that were killed, and end what their ranks have left."""
    for output in parent.glob(f"{_PREFIX}*/{_OUTPUT}"):  # it comes after the lock
        if (owner := output.with_name(_OWNER)).exists():
            with contextlib.suppress(OSError), _locked(owner):  # its controller lives, or it is somebody else's
                kill_heirs(owner.parent)
                shutil.rmtree(owner.parent, ignore_errors=True)


class Branch(ZygoteProcess):
    """A zygote that another one has forked, for a process that its controller has forked."""

    def __init__(self, of: ZygoteProcess) -> None:
        """Have `of`, the parent's, fork it; raises `ZygoteGoneError` if that does not live or does not answer."""
        self._begin(of.directory / f"branch{os.getpid()}", tuple(of._modules))
        try:
            self._channel = Channel(connect(of.directory), FromZygote)
            branched = self._channel.receive(START_TIMEOUT_S)
            self.directory.mkdir()
            self._process = ForeignProcess(branched.pid)
        except (EOFError, OSError, MessageError) as error:
            raise ZygoteGoneError(f"the ranks' zygote forked no other one: {error}") from error
        self._record(Preloaded(branched.error))


def _described(status: int) -> str:
    """Return how a process ended, by its exit status (negative for a signal)."""
    return f"was killed by {name_of_signal(-status)}" if status < 0 else f"exited with code {status}"
