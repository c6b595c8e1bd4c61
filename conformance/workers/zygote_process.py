"""The controller's handle of the zygote: starts it, asks it for ranks, and records how they ended."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

from conformance.errors import ConformanceError
from conformance.workers.interpreter import START_TIMEOUT_S, start_interpreter
from conformance.workers.messages import Ended, Forked, ForkPool, Preloaded, Seat, SignalRank, receive, send

_CLOSE_TIMEOUT_S = 5.0

#: The environment variable by which /proc/<pid>/environ shows which zygote a process belongs to.
MARKER = "DDP_CONFORMANCE_DIRECTORY"


class ZygoteGoneError(Exception):
    """The zygote has ended unexpectedly, and its ranks with it."""


class ZygoteProcess:
    """A zygote and the private directory that it shares with its ranks."""

    def __init__(
        self, work_dir: Path | None, preload: tuple[str, ...], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the zygote and return at once; the first `new_pool` waits until it has imported everything.

        `environment` overrides the usual environment variables of ranks.
        """
        try:
            self.directory = Path(tempfile.mkdtemp(prefix="ddp-conformance-", dir=work_dir))
        except OSError as error:
            raise ConformanceError(f"cannot make a private directory for the ranks: {error}") from error
        self.gone = False
        self._ready = False
        self._failure = ""
        self._ended: dict[tuple[int, int], int] = {}
        self._pool_numbers = itertools.count()
        self._forked: dict[int, tuple[int, ...]] = {}
        with open(self.directory / "zygote.output", "wb") as output:
            self._process, self._connection = start_interpreter(
                "conformance.workers.zygote",
                str(self.directory),
                *preload,
                environment={MARKER: str(self.directory), **(environment or {})},
                output=output,
            )

    def new_pool(self) -> tuple[int, Path]:
        """Return the number and the directory of a new pool, once the zygote has imported everything.

        Raises:
            ConformanceError: the zygote could not import everything.

        """
        self.await_ready()
        number = next(self._pool_numbers)
        directory = self.directory / f"pool{number}"
        directory.mkdir()
        return number, directory

    def fork(self, seats: tuple[Seat, ...]) -> tuple[tuple[int, ...], tuple[Connection, ...]]:
        """Fork one rank per seat of a pool; returns process ids and connections in the order of `seats`.

        Raises:
            ZygoteGoneError: the zygote has ended.

        """
        pool = seats[0].pool
        ours, theirs = zip(*(Pipe() for _ in seats), strict=True)
        try:
            send(self._connection, ForkPool(seats))
            for connection in theirs:
                send_handle(self._connection, connection.fileno(), self._process.pid)
        except OSError as error:
            self.gone = True
            raise ZygoteGoneError from error
        finally:
            for connection in theirs:
                connection.close()
        while pool not in self._forked:
            self._receive()
        return self._forked.pop(pool), ours

    def signal(self, seat: Seat, signum: int) -> None:
        """Send a signal to a rank and its children, if it lives; a rank does not outlive the zygote."""
        try:
            send(self._connection, SignalRank(seat.pool, seat.rank, signum))
        except OSError:
            self.gone = True

    @property
    def sources(self) -> tuple[Connection, ...]:
        """The connections to wait on besides the ranks'; when one is readable, call `update`."""
        return () if self.gone else (self._connection,)

    def update(self) -> None:
        """Record everything that the zygote has reported so far, including its own end. Does not wait."""
        with contextlib.suppress(ZygoteGoneError):
            while not self.gone and self._connection.poll(0):
                self._receive()

    def exit_status(self, seat: Seat) -> int | None:
        """Return the exit status of a rank (negative for a signal), None while it lives, as of the last `update`."""
        return self._ended.get((seat.pool, seat.rank))

    def close(self) -> None:
        """End the zygote and its ranks; none of them is left when this returns."""
        self._connection.close()
        if not self._ready:
            self._process.kill()  # it has no ranks yet, and would notice the closed connection only after its imports
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks go with it: PR_SET_PDEATHSIG
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def await_ready(self) -> None:
        """Wait until the zygote has imported everything; raises `ConformanceError` if it could not."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self._ready or self._failure):
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                self._failure = f"the ranks' zygote did not start within {START_TIMEOUT_S:.0f} s"
                break
            with contextlib.suppress(ZygoteGoneError):
                self._receive()
        if self._failure:
            raise ConformanceError(self._failure)

    def _receive(self) -> None:
        try:
            message = receive(self._connection)
        except (EOFError, OSError) as error:
            self.gone = True
            if not self._ready and not self._failure:
                output = (self.directory / "zygote.output").read_text(errors="replace")
                self._failure = f"the ranks' zygote died while it was starting:\n{output}"
            raise ZygoteGoneError from error
        if isinstance(message, Ended):
            self._ended[message.pool, message.rank] = message.status
        elif isinstance(message, Forked):
            self._forked[message.pool] = message.pids
        elif isinstance(message, Preloaded):
            self._ready = not message.error
            self._failure = message.error and f"the ranks' zygote could not import what ranks need:\n{message.error}"
        else:
            raise AssertionError(f"the zygote sent {message!r}")
