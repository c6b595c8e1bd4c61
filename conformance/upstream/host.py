"""The process that imports torch and its tests once and forks the ranks of each test.

`python -m conformance.upstream.host FD TARGET` serves the controller at the other end of the file descriptor `FD`, one
test at a time, with the DDP `TARGET` (`module:attr`). It has one thread whenever it forks. Nothing outlives it: the
kernel kills its ranks when it dies (`PR_SET_PDEATHSIG`), and it goes as soon as the controller has gone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from conformance.subjects.subject import Subject, load
from conformance.upstream.outcome import RankEnd, TestName, TestOutcome, TestRun
from conformance.upstream.rank import prepare_environment, run_rank
from conformance.upstream.requests import ListTests, Ran, Refusal, RunTest, Tests, ToHost
from conformance.upstream.suite import SUITES, ddp_tests
from conformance.upstream.swap import Factory
from conformance.workers import machine_time
from conformance.workers.channel import Channel, MessageError, pair, wait
from conformance.workers.forked import die_with, end_process, lead_own_group, name_of_signal, signal_group

#: How long ranks may go on after another one has failed: they may fail too, or hang for ever.
_GRACE_S = 3.0
#: A rank writes its stacks and exits at its deadline; the host kills one that does not, this much later.
_OVERTIME_S = 5.0
_OUTPUT_BYTES = 8192


class ControllerGoneError(Exception):
    """The controller has closed its connection."""


class Host:
    """The tests, as imported for one world size, and the DDP to run them with."""

    def __init__(self, channel: Channel, subject: Factory) -> None:
        self._channel = channel
        self._subject = subject
        self._world_size = 0

    def serve(self) -> None:
        """Answer the controller until it is gone."""
        while True:
            match self._channel.receive(None):
                case ListTests(world_size):
                    self._import_tests(world_size)
                    self._channel.send(Tests(tuple(self._tests())))
                case RunTest() as request:
                    self._import_tests(request.world_size)
                    self._channel.send(Ran(self._run(request)))

    def _import_tests(self, world_size: int) -> None:
        if world_size == self._world_size:
            return
        os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(world_size)}
        self._suites = []
        for suite in SUITES:
            with contextlib.suppress(ImportError):  # for example a build of torch without RPC
                suite.load()
                self._suites.append(suite)
        if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
            raise RuntimeError(f"importing torch's tests started {num_threads - 1} thread(s), which forked ranks lack")
        self._world_size = world_size

    def _tests(self) -> Iterator[TestName]:
        for suite in self._suites:
            if suite.world_size in (0, self._world_size):
                yield from (TestName(suite.name, method) for method in ddp_tests(suite))

    def _run(self, request: RunTest) -> TestRun:
        begin = time.monotonic()
        directory = Path(tempfile.mkdtemp(prefix="ddp-conformance-upstream-"))
        ranks: dict[int, _Rank] = {}
        try:
            for rank in range(request.world_size):
                ranks[rank] = self._fork(request, rank, directory, list(ranks.values()))
            ends = self._collect(request, ranks, directory)
        finally:
            for forked in ranks.values():
                forked.kill()
            shutil.rmtree(directory, ignore_errors=True)
        return TestRun(request.name, request.world_size, ends, time.monotonic() - begin)

    def _fork(self, request: RunTest, rank: int, directory: Path, elders: list[_Rank]) -> _Rank:
        ours, theirs = pair(RankEnd, bool)
        host = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        lead_own_group(pid)
        if pid == 0:
            for channel in (ours, self._channel, *(elder.channel for elder in elders)):
                channel.close()  # else this rank would keep another's connection open, and hide its death
            _become_rank(request, rank, directory, self._subject, theirs, host)
        theirs.close()
        return _Rank(pid, ours)

    def _collect(self, request: RunTest, ranks: dict[int, _Rank], directory: Path) -> tuple[RankEnd, ...]:
        """Wait for all ranks. Ranks that pass stay until the last has ended, because others use their connections."""
        ends: list[RankEnd] = []
        waiting = dict(ranks)
        deadline = machine_time.now() + request.timeout_s + _OVERTIME_S
        while waiting:
            ready = wait(
                [self._channel, *(rank.channel for rank in waiting.values())],
                max(0.0, deadline - machine_time.now()),
            )
            if self._channel in ready:
                raise ControllerGoneError  # it sends nothing while it waits for an answer, so this is the end of file
            for number, rank in list(waiting.items()):
                if rank.channel in ready and (end := _end_of(number, rank, directory)) is not None:
                    ends.append(end)
                    del waiting[number]
            if any(end.outcome.is_failure for end in ends):
                deadline = min(deadline, machine_time.now() + _GRACE_S)
            if machine_time.now() >= deadline:
                break
        failed = next((end.rank for end in ends if end.outcome.is_failure), None)
        for number in waiting:
            ends.append(
                RankEnd(number, TestOutcome.HUNG, f"no end within {request.timeout_s:.0f} s, and no stack to show")
                if failed is None
                else RankEnd(number, TestOutcome.STOPPED, f"still running {_GRACE_S:.0f} s after rank {failed} failed")
            )
        return tuple(ends)


@dataclass(frozen=True, slots=True)
class _Rank:
    pid: int
    channel: Channel

    def exit_cause(self) -> str:
        """Wait for the end of the process, which is near, and return how it ended; `kill` reaps it."""
        process = os.pidfd_open(self.pid)
        try:
            wait([process], _GRACE_S)
        finally:
            os.close(process)
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if end is None:
            return "closed its connection to the host"
        if end.si_code == os.CLD_EXITED:
            return f"exited with status {end.si_status}"
        return f"killed by {name_of_signal(end.si_status)}"

    def kill(self) -> None:
        """Kill the process, if it lives, and the processes that it started."""
        signal_group(self.pid, signal.SIGKILL)
        self.channel.close()
        os.waitpid(self.pid, 0)


def _end_of(number: int, rank: _Rank, directory: Path) -> RankEnd | None:
    """Return how a rank ended whose channel can be read; None if only a part of its message is here."""
    try:
        end: RankEnd | None = rank.channel.arrived()
    except MessageError as error:
        return RankEnd(number, TestOutcome.CRASHED, f"something in the rank wrote into its connection: {error}")
    except (EOFError, OSError):
        cause = rank.exit_cause()
        if stack := _tail(directory / f"stack{number}"):
            return RankEnd(number, TestOutcome.HUNG, _innermost_frames(stack), stack)
        return RankEnd(number, TestOutcome.CRASHED, cause, _tail(directory / f"output{number}"))
    return end


def _innermost_frames(stack: str) -> str:
    """Return where the main thread was; `faulthandler` writes it last, innermost frame first."""
    *_, main_thread = stack.split("Thread 0x")
    return "\n".join(line.strip() for line in main_thread.splitlines()[1:4])


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_OUTPUT_BYTES:].decode(errors="replace")
    except OSError:
        return ""


def _become_rank(
    request: RunTest, rank: int, directory: Path, subject: Factory, channel: Channel, host: int
) -> NoReturn:
    """Run the rank in the forked child, and exit; never returns into the host's code."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with(host)
        output = os.open(directory / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        cancel_deadline = prepare_environment(rank, request.world_size, directory, request.timeout_s)
        end = run_rank(request.name, rank, request.world_size, directory, subject)
        cancel_deadline()
        channel.send(end, None)
        if end.outcome is TestOutcome.PASSED:
            with contextlib.suppress(EOFError, OSError):
                channel.receive(None)  # the host's farewell: it closes the channel
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(1)


def main(arguments: list[str]) -> None:
    """Serve the controller; see the module."""
    channel, target = Channel(socket.socket(fileno=int(arguments[0])), ToHost), arguments[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))  # so that `finally` cleans up
    try:
        importlib.import_module("torch._dynamo")  # else DDP's constructor imports it, for a second on each rank
        host = Host(channel, load(Subject(target, target)))
        host.serve()
    except (EOFError, OSError, ControllerGoneError):
        pass
    except Exception:
        with contextlib.suppress(OSError):
            channel.send(Refusal(traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1:])
