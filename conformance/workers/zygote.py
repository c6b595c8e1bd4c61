"""The zygote: imports torch once and forks ranks, so that a rank costs a fork.

The controller starts `python -m conformance.workers.zygote` in a separate interpreter, because a rank must inherit
nothing from the controller: no threads, no CUDA context, no open files. The zygote imports what ranks need, runs none
of it, and has a single thread whenever it forks. Afterwards it only forks, signals and reaps ranks on the controller's
orders, and reports every death at once, which only a parent process can do. For each further controller that connects
to its socket in the private directory (`listener`), it forks a branch: a zygote like itself, in a directory of its own.

No process outlives the controller, however the controller ends. Its end of the connection closes with it; the zygote
then kills the ranks and the processes that they started, removes the private directory, and exits. If the zygote itself
is killed, the kernel kills the ranks and branches (`PR_SET_PDEATHSIG`).
"""

import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from conformance.waiting.limits import CONNECT_TIMEOUT_S
from conformance.workers.channel import Channel, wait
from conformance.workers.forked import (
    die_with,
    end_process,
    kill_heirs,
    lead_own_group,
    signal_group,
    signal_main_thread,
)
from conformance.workers.huge_pages import gather
from conformance.workers.listener import accepted, listen_for_controllers
from conformance.workers.messages import (
    STACK_SIGNAL,
    Branched,
    Ended,
    Forked,
    ForkPool,
    Preload,
    Preloaded,
    Seat,
    SignalRank,
    ToZygote,
)
from conformance.workers.rank_process import be_rank, exec_rank, preload

#: After so many forks the zygote moves its memory into huge pages, which pays off after as many more, see `gather`.
_FORKS_UNTIL_GATHER = 32


class ForkServer:
    """Forks, signals and reaps the ranks of one controller."""

    def __init__(self, channel: Channel, listener: socket.socket | None = None, preloaded: Sequence[str] = ()) -> None:
        """Start without ranks; `channel` leads to the controller, and to `listener` others connect."""
        self._channel = channel
        self._listener = listener
        self._preloaded = list(preloaded)
        self._import_error = ""
        self._seats: dict[int, Seat] = {}
        self._forks_until_gather = 0 if listener is None else _FORKS_UNTIL_GATHER  # a branch inherits huge pages
        self._wakeup, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._wakeup_writer, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Carry out the controller's orders until it is gone."""
        while True:
            ready = wait([self._channel, self._wakeup, *([self._listener] if self._listener else ())], None)
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._channel in ready:
                try:
                    message = self._channel.receive(None)
                except (EOFError, OSError):
                    return
                if isinstance(message, ForkPool):
                    self._fork_pool(message.seats)
                elif isinstance(message, SignalRank):
                    self._signal(message)
                elif isinstance(message, Preload):
                    self.preload(message.modules)
            elif self._listener is not None and self._listener in ready:  # what is to be imported, is imported first
                self._branch(self._listener)

    def preload(self, modules: tuple[str, ...]) -> bool:
        """Import the modules that ranks need and report to the controller; returns False where an import raises."""
        try:
            preload(modules)
        except BaseException:
            self._import_error = traceback.format_exc()
            self._channel.send(Preloaded(self._import_error))
            return False
        self._preloaded += modules
        self._channel.send(Preloaded())
        return True

    def kill_all(self) -> None:
        """Kill every rank and the processes that it started, and wait until they are gone."""
        for pid in self._seats:
            signal_group(pid, signal.SIGKILL)
        for pid in list(self._seats):
            os.waitpid(pid, 0)

    def _fork_pool(self, seats: tuple[Seat, ...]) -> None:
        handles = self._channel.receive_handles(len(seats), CONNECT_TIMEOUT_S)
        pids = []
        self._gather_memory_if_due(len(seats))
        for seat, handle in zip(seats, handles, strict=True):
            zygote = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                self._abandon_pool(seats[0].pool, handles, error)
                return
            lead_own_group(pid)  # in the parent and in the child: whichever runs first
            if pid == 0:
                listening = [self._listener.fileno()] if self._listener else []
                for other in (*handles, *listening, self._wakeup, self._wakeup_writer, self._channel.fileno()):
                    if other != handle:
                        os.close(other)  # else this rank would keep another rank's connection, or the zygote's, open
                _become_rank(seat, handle, zygote, self._preloaded)
            self._seats[pid] = seat
            pids.append(pid)
        for handle in handles:
            os.close(handle)
        self._channel.send(Forked(seats[0].pool, tuple(pids)), None)

    def _gather_memory_if_due(self, num_forks: int) -> None:
        if 0 < self._forks_until_gather <= num_forks:
            gather()
        self._forks_until_gather -= num_forks

    def _branch(self, listener: socket.socket) -> None:
        """Fork a zygote for a controller that has connected; if it cannot be forked, the connection ends."""
        self._gather_memory_if_due(_FORKS_UNTIL_GATHER)  # a branch makes many forks
        zygote = os.getpid()
        with suppress(OSError), accepted(listener) as connected:
            if os.fork() == 0:
                for other in (self._wakeup, self._wakeup_writer, self._channel.fileno(), listener.fileno()):
                    os.close(other)
                _become_branch(Channel(connected, ToZygote), zygote, self._preloaded, self._import_error)

    def _abandon_pool(self, pool: int, handles: list[int], error: OSError) -> None:
        """End the ranks of a pool that cannot be complete, and report to the controller."""
        for pid in [pid for pid, seat in self._seats.items() if seat.pool == pool]:
            signal_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self._seats[pid]
        for handle in handles:
            os.close(handle)
        self._channel.send(Forked(pool, (), error.strerror or str(error)), None)

    def _signal(self, message: SignalRank) -> None:
        for pid, seat in self._seats.items():  # only ranks not yet reaped: another process may reuse a reaped one's pid
            if (seat.pool, seat.rank) == (message.pool, message.rank):
                send_signal = signal_main_thread if message.signum == STACK_SIGNAL else signal_group
                send_signal(pid, message.signum)

    def _reap(self) -> None:
        """Report each rank that has died to the controller, and kill the processes that it started."""
        while self._seats:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            seat = self._seats.pop(pid, None)
            if seat is None:
                continue  # a branch, or a process that a preloaded module has started
            signal_group(pid, signal.SIGKILL)  # processes that a dead rank started must not live on
            self._channel.send(Ended(seat.pool, seat.rank, os.waitstatus_to_exitcode(status)), None)


def _become_rank(seat: Seat, handle: int, zygote: int, preloaded: Sequence[str]) -> NoReturn:
    """Run the rank in the forked child, and exit; never returns into the zygote's code."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with(zygote)
        if seat.apart:
            exec_rank(seat, handle, preloaded)
        be_rank(seat, handle)
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(1)


def _become_branch(channel: Channel, zygote: int, preloaded: Sequence[str], import_error: str) -> NoReturn:
    """Serve another controller in the forked child, and exit; never returns into the first zygote's code."""
    try:
        die_with(zygote)
        server = ForkServer(channel, preloaded=preloaded)
        channel.send(Branched(os.getpid(), import_error))
        try:
            server.serve()
        finally:
            server.kill_all()
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(1)  # the zygote that reaps a branch ignores its status


def main(arguments: list[str]) -> None:
    """Serve the controller at the other end of the file descriptor `arguments[0]`.

    `arguments[1]` is the private directory, which `main` removes at the end; the rest are modules to import.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a child inherits the signals that the controller's parent blocked
    channel, directory = Channel(socket.socket(fileno=int(arguments[0])), ToZygote), arguments[1]
    server = ForkServer(channel, listen_for_controllers(directory))
    try:
        if server.preload(tuple(arguments[2:])):
            server.serve()
    finally:
        server.kill_all()
        kill_heirs(directory, but=os.getpid())
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
