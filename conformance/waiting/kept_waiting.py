"""`KeptWaiting` and `Stopwatch`: for how long a busy machine kept processes waiting that had something to do."""

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator

from conformance.waiting.limits import LATE_S, LOOK_AGAIN_S

#: Since when the machine is up, for how long some process of it was waiting for memory that others held.
_MEMORY_PRESSURE = "/proc/pressure/memory"
#: However busy the machine is, a process gives up after this many times the seconds that it wanted to wait.
MOST_TIMES = 10
#: For how many nanoseconds a thread ran so far, how long it waited for a processor, and how often it got one.
_Counts = tuple[int, int, int]
_NOTHING: _Counts = (0, 0, 0)
#: A thread that runs for less, each time that it runs, looks only whether there is something to do: gloo's, which
#: sleep 10 ms in between, run for 13 to 18 us each time, and those of a rank that gets on for 1 ms in the median.
_LEAST_TURN_NS = 50_000
#: Where a thread runs for less of the time than this, one wait may be as long as what ranks have.
_SELDOM = 0.1
#: Pauses grow to this share of what has passed, and to `LOOK_AGAIN_S`: who waits long need not look so often.
_SHARE_OF_A_PAUSE = 0.2


class KeptWaiting:
    """How long some processes could have gone on and got no processor, or no memory, as Linux counts it.

    A rank that waits for another one, or for ever, waits for neither. What waits for memory is counted for the machine
    as a whole: where it is exhausted, code is read from the disk again and again, and nobody gets on.
    """

    def __init__(self, pids: Iterable[int], but: Collection[int] = ()) -> None:
        """Begin to count, also for threads that are yet to start, but not for `but`; tens of microseconds a process."""
        self._began = time.monotonic()
        self._before = {pid: _counts(pid) for pid in pids}
        self._counts = {pid: dict(counts) for pid, counts in self._before.items()}
        self._but = {str(thread) for thread in but}
        self._short_of_memory_before_s = _short_of_memory_s()
        self._ready: dict[str, _Counts] = {}

    @property
    def longest_s(self) -> float:
        """The longest wait since the beginning, of any thread or for memory; 0 where the kernel does not count.

        The wait of a thread that has ended counts if this was read before its end.
        """
        waits = (waited_s for _, waited_s in self._since_the_beginning())
        return max(0.0, self._short_of_memory_s(), *waits)

    @property
    def in_turn_s(self) -> float:
        """How long threads waited if each waited for another that waited for a processor: the sum of their waits.

        No time counts in which the thread that ran most did.
        """
        counts = self._since_the_beginning()
        could_use_s = max((ran_s for ran_s, _ in counts), default=0.0)
        kept_s = min(sum(waited_s for _, waited_s in counts), time.monotonic() - self._began - could_use_s)
        return max(0.0, kept_s, self._short_of_memory_s())

    @property
    def ran_s(self) -> float:
        """For how many seconds the thread that ran most did."""
        return max((ran_s for ran_s, _ in self._since_the_beginning()), default=0.0)

    def _short_of_memory_s(self) -> float:
        return _short_of_memory_s() - self._short_of_memory_before_s

    def _since_the_beginning(self) -> list[tuple[float, float]]:
        """Return for how long each thread ran, and was kept waiting; one that polls waits for nothing that it needs."""
        found = []
        for pid, counts in self._counts.items():
            counts |= _counts(pid)
            for thread, now in counts.items():
                if thread not in self._but:
                    ran, waited, turns = self._more(pid, thread, now)
                    found.append((ran / 1e9, 0.0 if ran < turns * _LEAST_TURN_NS else waited / 1e9))
        return found

    def _more(self, pid: int, thread: str, now: _Counts) -> _Counts:
        ran, waited, turns = self._before[pid].get(thread, _NOTHING)
        return now[0] - ran, now[1] - waited, now[2] - turns

    def goes_on(self) -> bool:
        """Whether a thread waits now: it is ready, or waits for the disk, and has not run since the last call.

        Linux counts a wait when it has ended, so that a long one is 0 until then. Call this twice, ten milliseconds
        apart: a thread that was not ready at the last call counts as waiting. One that polls does not, nor one that
        gets a processor now and then, whose waits the other properties count.
        """
        before, passed_ns = self._ready, (time.monotonic() - self._began) * 1e9
        self._ready = {}
        for pid in self._before:
            for thread, counts in _ready(pid).items():
                ran, _, turns = self._more(pid, thread, counts)
                if thread not in self._but and turns * _LEAST_TURN_NS <= ran < max(1.0, _SELDOM * passed_ns):
                    self._ready[thread] = counts
        return any(before.get(thread, counts) == counts for thread, counts in self._ready.items())


class Stopwatch:
    """Measures elapsed time, less the longest wait of one thread of this process for a processor, or for memory."""

    def __init__(self) -> None:
        self._began, self._kept_waiting = time.monotonic(), KeptWaiting([os.getpid()])

    @property
    def seconds(self) -> float:
        """The seconds since the beginning that this process could use; a wait counts when it ends."""
        kept_s = self._kept_waiting.longest_s
        return max(0.0, time.monotonic() - self._began - kept_s)


def process_seconds(seconds: float, *, pause_s: float) -> Iterator[None]:
    """Yield as `seconds_of` does, until the other threads of this process could have gone on for `seconds`."""
    return seconds_of([os.getpid()], seconds, pause_s=pause_s, but=[threading.get_native_id()])


def seconds_of(
    pids: Iterable[int], seconds: float, *, pause_s: float, most_times: float = MOST_TIMES, but: Collection[int] = ()
) -> Iterator[None]:
    """Yield until the threads of these processes could have gone on for `seconds`: every `pause_s`, later more rarely.

    By the last yield they have had enough time, also on a busy machine, or one that stood still; it is at the latest
    after `most_times` the seconds. Threads in `but` do not count.
    """
    yield
    kept_waiting, passed_s = KeptWaiting(pids, but), 0.0
    looked_at = time.monotonic()
    while passed_s < seconds or (
        passed_s < most_times * seconds and (passed_s < seconds + kept_waiting.longest_s or kept_waiting.goes_on())
    ):
        pause_s = max(pause_s, min(LOOK_AGAIN_S, passed_s * _SHARE_OF_A_PAUSE))
        time.sleep(pause_s)
        before, looked_at = looked_at, time.monotonic()
        passed_s += min(looked_at - before, pause_s + LATE_S)
        yield


def _counts(pid: int) -> dict[str, _Counts]:
    """Return the counts of each thread, by its number; nothing of threads that are gone, or that nobody counts."""
    found: dict[str, _Counts] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError):
                ran, waited, turns = _text(f"/proc/{pid}/task/{thread}/schedstat").split()
                if turns != b"0":
                    found[thread] = int(ran), int(waited), int(turns)
    return found


def _ready(pid: int) -> dict[str, _Counts]:
    """Return the counts of the threads that are ready, or wait for the disk."""
    ready = {}
    for thread, counts in _counts(pid).items():
        with contextlib.suppress(OSError):
            if _text(f"/proc/{pid}/task/{thread}/stat").rpartition(b") ")[2][:1] in (b"R", b"D"):
                ready[thread] = counts
    return ready


def _short_of_memory_s() -> float:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(_text(_MEMORY_PRESSURE).split()[4].partition(b"=")[2]) / 1e6  # of the first line, that of some
    return 0.0


def _text(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 128)
    finally:
        os.close(file)
