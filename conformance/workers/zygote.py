"""The process that ranks are forked from: torch is imported once, a rank costs a fork.

`python -m conformance.workers.zygote` is started by a controller in an interpreter of its own, because a rank must
inherit nothing of the controller's: no threads, no CUDA context, no open files. It imports what ranks need, never
runs any of it, and has a single thread whenever it forks. From then on it is a parent and nothing else: it forks,
signals and buries ranks as it is told, and reports their deaths at once, which only a parent can do.

Nothing outlives the controller, however it ends. The controller's end of the connection closes with it: then the zygote
kills its ranks and whatever they started, removes the private directory, and goes. The kernel kills the ranks
(`PR_SET_PDEATHSIG`) should the zygote itself be killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import shutil
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import NoReturn

from conformance.workers.forked import die_with, lead_own_group, signal_group, signal_main_thread
from conformance.workers.messages import (
    STACK_SIGNAL,
    Ended,
    Forked,
    ForkPool,
    Preloaded,
    Seat,
    SignalRank,
    receive,
    send,
)
from conformance.workers.rank_main import rank_main

#: What every rank needs: torch's DDP constructor would import torch._dynamo for more than a second, once per rank.
PRELOAD = ("torch._dynamo", "torch.nn.parallel", "ddp_impl", "numpy")

_PR_SET_NAME = 15


def preload(modules: tuple[str, ...]) -> None:
    """Import all that ranks share. Raises what a module raises, and `RuntimeError` when one leaves a thread behind."""
    from conformance.models.catalogue import load_fixtures
    from conformance.programs.registry import load_programs

    load_programs()
    load_fixtures()
    for name in (*modules, *PRELOAD):
        importlib.import_module(name)
        if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
            raise RuntimeError(f"importing {name} started {num_threads - 1} thread(s), which a forked rank would lack")
    gc.collect()
    gc.freeze()  # ranks collect after every scenario: without this each would walk, and copy, all of torch


class Nursery:
    """The ranks that were forked and not yet buried."""

    def __init__(self, connection: Connection) -> None:
        """Begin with none; `connection` leads to the controller."""
        self._connection = connection
        self._seats: dict[int, Seat] = {}
        self._wakeup, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._wakeup_writer, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Do what the controller says until it is gone."""
        while True:
            ready = wait([self._connection, self._wakeup])
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._bury()
            if self._connection in ready:
                try:
                    message = receive(self._connection)
                except (EOFError, OSError):
                    return
                if isinstance(message, ForkPool):
                    self._fork_pool(message.seats)
                elif isinstance(message, SignalRank):
                    self._signal(message)

    def kill_all(self) -> None:
        """Kill every rank and what it started, and wait until they are gone."""
        for pid in self._seats:
            signal_group(pid, signal.SIGKILL)
        for pid in list(self._seats):
            os.waitpid(pid, 0)

    def _fork_pool(self, seats: tuple[Seat, ...]) -> None:
        handles = [recv_handle(self._connection) for _ in seats]
        pids = []
        for seat, handle in zip(seats, handles, strict=True):
            zygote = os.getpid()
            pid = os.fork()
            lead_own_group(pid)
            if pid == 0:
                for other in (*handles, self._wakeup, self._wakeup_writer, self._connection.fileno()):
                    if other != handle:
                        os.close(other)  # or this rank would keep a dead one's connection, or the zygote's, open
                _become_rank(seat, Connection(handle), zygote)
            self._seats[pid] = seat
            pids.append(pid)
        for handle in handles:
            os.close(handle)
        send(self._connection, Forked(seats[0].pool, tuple(pids)))

    def _signal(self, message: SignalRank) -> None:
        for pid, seat in self._seats.items():  # only the living: a buried one's id may belong to somebody else
            if (seat.pool, seat.rank) == (message.pool, message.rank):
                send_signal = signal_main_thread if message.signum == STACK_SIGNAL else signal_group
                send_signal(pid, message.signum)

    def _bury(self) -> None:
        while self._seats:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            seat = self._seats.pop(pid, None)
            if seat is None:
                continue  # something that a preloaded module has started
            signal_group(pid, signal.SIGKILL)  # what a dead rank started must not live on
            send(self._connection, Ended(seat.pool, seat.rank, os.waitstatus_to_exitcode(status)))


def _become_rank(seat: Seat, connection: Connection, zygote: int) -> NoReturn:
    """Turn the forked child into a rank; never returns into the zygote's code."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with(zygote)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank{seat.rank}of{seat.world_size}".encode(), 0, 0, 0)
        rank_main(seat, connection)
        status = 0
    except SystemExit as end:  # a program may call sys.exit: that is how the rank ends, not a harness error
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(arguments: list[str]) -> None:
    """Serve the controller at the other end of the file descriptor `arguments[0]`.

    `arguments[1]` is the private directory, which is removed at the end; the rest are modules to import.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what the controller's parent blocked is inherited
    connection, directory = Connection(int(arguments[0])), arguments[1]
    nursery = Nursery(connection)
    try:
        try:
            preload(tuple(arguments[2:]))
        except BaseException:
            send(connection, Preloaded(traceback.format_exc()))
            return
        send(connection, Preloaded())
        nursery.serve()
    finally:
        nursery.kill_all()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
