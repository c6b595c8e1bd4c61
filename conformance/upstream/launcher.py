"""The controller's side of `upstream`: starts hosts and runs all tests in them."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from conformance.errors import ConformanceError
from conformance.subjects.subject import Subject
from conformance.upstream.outcome import RankEnd, TestName, TestOutcome, TestRun
from conformance.upstream.requests import FromHost, ListTests, Ran, Refusal, RunTest, Tests
from conformance.workers.channel import Channel, MessageError
from conformance.workers.interpreter import START_TIMEOUT_S, start_interpreter

#: A test gets the smallest of these world sizes at which it can run.
WORLD_SIZES = (2, 3, 4, 6)

#: How much longer than a test's deadline a host may take before the launcher takes the host for hung.
_PATIENCE_S = 60.0

_Answer = TypeVar("_Answer", Tests, Ran)


class WarmHost:
    """A process that has imported torch, its tests and one DDP, and forks ranks; see `conformance.upstream.host`.

    Started when it is first needed, and again after it died.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._running: tuple[subprocess.Popen[bytes], Channel] | None = None

    def tests(self, world_size: int) -> tuple[TestName, ...]:
        """Return the DDP tests that can run at `world_size`; raises `ConformanceError`."""
        try:
            return self._ask(ListTests(world_size), START_TIMEOUT_S, Tests).names
        except _HostDiedError as death:
            raise ConformanceError(f"cannot list torch's tests: their host died ({death})") from death

    def run(self, name: TestName, world_size: int, timeout_s: float) -> TestRun:
        """Run one test and return its result, also if its host dies; the next call then starts a new host."""
        try:
            return self._ask(RunTest(name, world_size, timeout_s), START_TIMEOUT_S + timeout_s + _PATIENCE_S, Ran).run
        except _HostDiedError as death:
            self.close()
            return TestRun(name, world_size, (RankEnd(0, TestOutcome.CRASHED, f"the host of the ranks died: {death}"),))

    def abandon(self) -> None:
        """Make the process end its ranks and itself; call it from another thread than the one that waits in `run`."""
        running = self._running  # the other thread may reset it
        if running is not None:
            running[0].terminate()

    def close(self) -> None:
        """End the process and its ranks; none is left when this returns."""
        if self._running is None:
            return
        process, channel = self._running
        channel.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._running = None

    def _ask(self, request: ListTests | RunTest, timeout_s: float, expected: type[_Answer]) -> _Answer:
        if self._running is None:
            self._running = start_interpreter(
                "conformance.upstream.host",
                self._subject.target,
                expects=FromHost,
                environment={"PYTORCH_PRINT_REPRO_ON_FAILURE": "0"},
            )
        process, channel = self._running
        try:
            channel.send(request)
            answer = channel.receive(timeout_s)
        except TimeoutError as error:
            raise _HostDiedError(f"no answer within {timeout_s:.0f} s") from error
        except (EOFError, OSError, MessageError) as error:
            process.kill()  # it may have closed only its connection
            raise _HostDiedError(f"exit status {process.wait()}") from error
        if isinstance(answer, Refusal):
            raise ConformanceError(f"cannot run torch's tests with {self._subject.name}:\n{answer.reason}")
        if not isinstance(answer, expected):
            raise _HostDiedError(f"it answered with {type(answer).__name__}")
        return answer


class _HostDiedError(Exception):
    pass


@contextlib.contextmanager
def warm_hosts(subject: Subject, num_hosts: int) -> Iterator[list[WarmHost]]:
    """Provide hosts for one DDP; at the end, close them and every process that they started."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(WarmHost(subject))) for _ in range(num_hosts)]


def find_tests(host: WarmHost, world_size: int | None = None) -> dict[TestName, int]:
    """Return all DDP tests of this torch, and the world size for each.

    Without `world_size` each gets the smallest of `WORLD_SIZES` at which it can run; with it, those that cannot run at
    it are left out.

    Raises:
        ConformanceError: torch's tests cannot be imported here.

    """
    found: dict[TestName, int] = {}
    for size in WORLD_SIZES if world_size is None else (world_size,):
        for name in host.tests(size):
            found.setdefault(name, size)
    return dict(sorted(found.items()))


def run_tests(
    hosts: Sequence[WarmHost],
    tests: Mapping[TestName, int],
    *,
    timeout_s: float,
    on_end: Callable[[TestRun], None] = lambda run: None,
) -> dict[TestName, TestRun]:
    """Run `tests` on `hosts`, each for at most `timeout_s` seconds; calls `on_end` after every test.

    Raises:
        ConformanceError: the DDP of the hosts cannot be imported there.

    """
    left: queue.SimpleQueue[tuple[TestName, int]] = queue.SimpleQueue()
    for item in sorted(tests.items(), key=lambda item: item[1]):  # a host imports the tests again for each world size
        left.put(item)
    runs: dict[TestName, TestRun] = {}
    stopped = threading.Event()

    def work(host: WarmHost) -> None:
        try:
            while not stopped.is_set():
                name, world_size = left.get_nowait()
                runs[name] = host.run(name, world_size, timeout_s)
                on_end(runs[name])
        except queue.Empty:
            pass
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(len(hosts)) as executor:
        try:
            for future in [executor.submit(work, host) for host in hosts]:
                future.result()
        except BaseException:
            stopped.set()
            for host in hosts:
                host.abandon()
            raise
    return runs
