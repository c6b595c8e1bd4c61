"""What counts as waiting for a processor or for memory: neither sleeping nor computing does."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from conformance.observation import IMPORT
from conformance.recorder.flight_record import FlightRecord, LastSeen
from conformance.tests.clock import Clock
from conformance.waiting import kept_waiting, machine_time, processors
from conformance.waiting.kept_waiting import KeptWaiting, Stopwatch, process_seconds, seconds_of
from conformance.waiting.processors import Processors
from conformance.workers import deadline as deadline_module
from conformance.workers.deadline import Deadline

#: Two that share a processor have each waited for it so long, a few moments later.
_LONG_S = 0.3


@pytest.fixture(autouse=True)
def enough_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_waiting, "_MEMORY_PRESSURE", str(tmp_path / "none"))


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Two processes on one processor that run the parameter."""
    processor = min(os.sched_getaffinity(0))
    code = f"import os, time; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile True: {request.param}"
    started = [subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    for one in started:
        assert one.stdout is not None
        one.stdout.readline()  # it runs
    yield [one.pid for one in started]
    for one in started:
        one.kill()
        one.communicate()


def begins_at_nought(processes: list[int]) -> KeptWaiting:
    """Return what keeps these waiting; it has not counted what was before, however late this process looks."""
    began = time.monotonic()
    waits = KeptWaiting(processes)
    assert waits.longest_s < _LONG_S + time.monotonic() - began
    return waits


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("processes", ["pass"], indirect=True)
def test_two_that_compute_on_one_kept_waiting_for_it(processes: list[int]) -> None:
    waits = begins_at_nought(processes)
    until = time.monotonic() + 60
    while (waited_s := waits.longest_s) < _LONG_S and time.monotonic() < until:
        time.sleep(0.05)
    assert waited_s >= _LONG_S
    begins_at_nought(processes)


@pytest.mark.parametrize("processes", ["pass"], indirect=True)
def test_ranks_that_wait_for_a_processor_are_waited_for_also_when_another_has_failed(processes: list[int]) -> None:
    waits = KeptWaiting(processes)
    waiting, hurried = (Deadline(20.0, processes, ["no such flight record"]) for _ in range(2))
    hurried.cut_to(10.0)
    before_s, hurried_before_s = waiting.until(), hurried.until()
    until = time.monotonic() + 60
    while (waited_s := waits.longest_s) < 3 * _LONG_S and time.monotonic() < until:
        time.sleep(0.05)
        machine_time.resume()  # the machine has not stood still
    assert waiting.until() - before_s >= waited_s - _LONG_S
    assert hurried.until() - hurried_before_s >= waited_s - _LONG_S


def test_an_import_has_all_deadlines_unless_a_rank_has_failed(tmp_path: Path) -> None:
    record = FlightRecord(str(tmp_path / "flight"))
    waiting = Deadline(20.0, [os.getpid()], [str(tmp_path / "flight")])
    record.start()
    ordinary = waiting.until()
    record.entered(IMPORT, -1, True)
    assert waiting.until() > ordinary + 60
    record.entered("construct", -1, True)
    assert waiting.until() < ordinary + 60
    record.entered(IMPORT, -1, True)
    waiting.cut_to(1.0)
    assert waiting.until() < ordinary


@pytest.mark.parametrize("processes", ["time.sleep(60)"], indirect=True)
def test_one_that_sleeps_waits_for_none(processes: list[int]) -> None:
    while {*map(_state, processes)} != {"S"}:
        time.sleep(0.01)
    waits = KeptWaiting(processes)
    time.sleep(2 * _LONG_S)
    assert waits.longest_s < _LONG_S


def test_a_process_that_is_gone_waits_for_none() -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    waits = KeptWaiting([ended.pid])
    ended.wait()
    assert waits.longest_s == waits.in_turn_s == 0


def test_a_machine_that_is_out_of_memory_keeps_everybody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressure = tmp_path / "memory"
    monkeypatch.setattr(kept_waiting, "_MEMORY_PRESSURE", str(pressure))
    text = (
        "some avg10=77.93 avg60=47.72 avg300=35.11 total={}\nfull avg10=0.00 avg60=1.72 avg300=5.49 total=183275080\n"
    )
    pressure.write_text(text.format(40_242_439_194))
    waits = KeptWaiting([])
    assert waits.longest_s == waits.in_turn_s == 0
    pressure.write_text(text.format(40_244_939_194))
    assert waits.longest_s == waits.in_turn_s == pytest.approx(2.5)
    pressure.unlink()  # a kernel that does not count
    assert KeptWaiting([]).longest_s == 0


def counted(monkeypatch: pytest.MonkeyPatch, *counts: dict[str, tuple[float, float, int]]) -> Clock:
    """Have one process show `counts` (seconds run and waited, turns), one at each look; return its clock."""
    clock, found = (
        Clock(),
        [
            {name: (int(ran_s * 1e9), int(waited_s * 1e9), turns) for name, (ran_s, waited_s, turns) in one.items()}
            for one in counts
        ],
    )
    monkeypatch.setattr(kept_waiting, "time", clock)
    monkeypatch.setattr(kept_waiting, "_counts", lambda pid: found.pop(0))
    return clock


@pytest.mark.parametrize(
    ("later", "longest_s", "in_turn_s"),
    [
        ({"1": (0.0, 0.0, 9)}, 0.0, 0.0),
        ({"1": (0.0, 0.0, 9), "2": (1.0, 3.0, 9)}, 3.0, 3.0),
        ({"1": (0.25, 2.0, 9), "2": (0.25, 2.0, 9)}, 2.0, 4.0),
        ({"1": (1.0, 4.0, 9), "2": (2.0, 3.0, 9)}, 4.0, 3.0),
        ({"1": (5.0, 0.0, 9), "2": (0.5, 4.5, 9)}, 4.5, 0.0),
        ({"1": (0.0, 0.0, 9), "2": (0.00075, 4.5, 50)}, 0.0, 0.0),
        ({"1": (0.0, 4.5, 0)}, 4.5, 4.5),
    ],
    ids=["sleeps", "begins later", "in turn", "side by side", "beside one", "polls", "waits still"],
)
def test_waits_may_follow_each_other_but_not_a_thread_that_runs(
    monkeypatch: pytest.MonkeyPatch, later: dict[str, tuple[float, float, int]], longest_s: float, in_turn_s: float
) -> None:
    clock = counted(monkeypatch, {"1": (0.0, 0.0, 0)}, later, {})
    waits = KeptWaiting([1])
    clock.sleep(5.0)
    assert (waits.longest_s, waits.in_turn_s) == pytest.approx((longest_s, in_turn_s))  # also when all have ended


def test_the_thread_that_looks_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = counted(monkeypatch, {"1": (0.0, 0.0, 0), "2": (0.0, 0.0, 0)}, {"1": (1.0, 9.0, 9), "2": (1.0, 2.0, 9)})
    waits = KeptWaiting([1], but=[1])
    clock.sleep(9.0)
    assert waits.longest_s == 2.0


def test_a_stopwatch_stands_still_while_a_thread_gets_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = counted(monkeypatch, {}, {"1": (0.5, 3.0, 9), "2": (0.5, 2.0, 9)})
    stopwatch = Stopwatch()
    clock.sleep(4.5)
    assert stopwatch.seconds == 1.5  # of two, each may have waited for something else


def test_a_wait_that_has_not_ended_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts it when it ends: until then the counts of a thread that is ready stay the same."""
    ms = 1_000_000
    one, later, polls = (ms, 0, 1), (2 * ms, 3, 2), (20_000, 9, 1)
    looks: list[dict[str, tuple[int, int, int]]] = [
        {"1": one}, {"1": one}, {"1": later}, {}, {"2": one}, {"2": one, "3": one}, {"4": polls},
        {"2": (101 * ms, 0, 9), "4": polls}, {"2": (101 * ms, 0, 9)},
    ]  # fmt: skip
    clock = Clock()
    monkeypatch.setattr(kept_waiting, "time", clock)
    monkeypatch.setattr(kept_waiting, "_counts", lambda pid: {})
    monkeypatch.setattr(kept_waiting, "_ready", lambda pid: looks.pop(0))
    waits = KeptWaiting([1], but=[3])
    clock.sleep(1.0)
    assert [waits.goes_on() for _ in range(6)] == [True, True, False, False, True, True]
    assert [waits.goes_on() for _ in range(3)] == [False] * 3  # one that runs for a tenth of the time does not wait


@pytest.mark.parametrize("processes", ["pass"], indirect=True)
def test_of_two_that_compute_on_one_processor_one_waits_that_hardly_gets_it(processes: list[int]) -> None:
    os.sched_setscheduler(processes[0], os.SCHED_IDLE, os.sched_param(0))
    waits = KeptWaiting(processes)
    assert any(waits.goes_on() for _ in range(3))
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
        while _state(pid) != "T":
            time.sleep(0.01)
    assert [waits.goes_on() for _ in range(2)] == [False] * 2  # also when none has run since the last look


def test_who_waits_for_a_processor_is_not_given_up_and_who_goes_on_waiting_is(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [True, True, False]
    monkeypatch.setattr(KeptWaiting, "goes_on", lambda self: looks.pop(0))
    waiting = Deadline(10.0, [], ["no such flight record"])
    monkeypatch.setattr(machine_time, "now", lambda: waiting._since + 10.0)
    assert [waiting.until() - machine_time.now() > 0 for _ in range(3)] == [True, True, False]
    assert not looks
    monkeypatch.setattr(machine_time, "now", lambda: waiting._since + 100.0)
    assert waiting.until() <= machine_time.now()  # and nobody looks any more


def test_a_wait_that_ends_while_the_deadline_passes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts it then; it was ready at no other look."""
    waiting = Deadline(10.0, [], ["no such flight record"])

    def ends(kept: KeptWaiting) -> bool:
        monkeypatch.setattr(KeptWaiting, "in_turn_s", 3.0)
        return False

    monkeypatch.setattr(KeptWaiting, "goes_on", ends)
    monkeypatch.setattr(machine_time, "now", lambda: waiting._since + 10.0)
    assert waiting.until() == waiting._since + 13.0


def test_a_deadline_passes_only_where_somebody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that gets no processor between two looks gives up nobody for that."""
    waiting, looks = Deadline(10.0, [], ["no such flight record"]), [True, True, False]
    monkeypatch.setattr(KeptWaiting, "goes_on", lambda self: looks.pop(0))
    seconds = itertools.count(10.0)
    monkeypatch.setattr(machine_time, "now", lambda: waiting._since + next(seconds))  # a second at each look
    trio.run(waiting.passes)
    assert not looks


@pytest.mark.parametrize(("most_times", "num_looks"), [(3.0, 7), (10.0, 21)])
def test_ones_seconds_do_not_pass_while_it_waits_but_end(
    monkeypatch: pytest.MonkeyPatch, most_times: float, num_looks: int
) -> None:
    monkeypatch.setattr(kept_waiting, "_ready", lambda pid: {"1": (50_000, 0, 1)})
    monkeypatch.setattr(kept_waiting, "_counts", lambda pid: {})
    monkeypatch.setattr(kept_waiting, "time", Clock())
    assert sum(1 for _ in seconds_of([1], 1.0, pause_s=0.5, most_times=most_times)) == num_looks


class NeverKept:
    """Stands for processes that nothing kept waiting."""

    longest_s = 0.0

    def __init__(self, pids: list[int], but: list[int]) -> None:
        pass

    def goes_on(self) -> bool:
        return False


def test_what_happens_in_the_last_pause_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_waiting, "KeptWaiting", NeverKept)
    assert sum(1 for _ in process_seconds(0.01, pause_s=0.05)) == 2


def test_a_pause_that_a_stopped_machine_made_long_is_as_long_as_it_was_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_waiting, "KeptWaiting", NeverKept)
    clock, late_s = Clock(), [5.0, 0.0]
    monkeypatch.setattr(
        kept_waiting,
        "time",
        SimpleNamespace(monotonic=clock.monotonic, sleep=lambda pause_s: clock.sleep(pause_s + late_s.pop())),
    )
    looks = process_seconds(1.0, pause_s=0.4)
    assert [next(looks, "ended") for _ in range(4)] == [None, None, None, "ended"]


@pytest.mark.parametrize(("kept_waiting_s", "least_s"), [(0.0, 0.1), (0.3, 0.4), (60.0, 1.0)])
def test_a_process_has_its_own_seconds_and_an_end_of_them(
    monkeypatch: pytest.MonkeyPatch, kept_waiting_s: float, least_s: float
) -> None:
    class Kept:
        longest_s = kept_waiting_s

        def __init__(self, pids: list[int], but: list[int]) -> None:
            assert (pids, but) == ([os.getpid()], [threading.get_native_id()])

        def goes_on(self) -> bool:
            return False

    clock = Clock()
    monkeypatch.setattr(kept_waiting, "KeptWaiting", Kept)
    monkeypatch.setattr(kept_waiting, "time", clock)
    started = clock.monotonic()
    looks = sum(1 for _ in process_seconds(0.1, pause_s=0.01))
    assert clock.monotonic() - started == pytest.approx(least_s, abs=0.011)
    assert looks > 1
    for _ in process_seconds(60.0, pause_s=60.0):
        break  # the first look comes at once


def test_who_has_failed_ends_the_wait_for_those_that_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = LastSeen("forward", 0, 0, 0, (), time.monotonic() + 1e6)
    monkeypatch.setattr(deadline_module, "read_flight", lambda path: ahead)
    hurried = Deadline(100.0, [], ["a flight record"])
    hurried.cut_to(0.1)
    assert hurried.until() - machine_time.now() <= 2.0


def test_no_more_is_left_out_than_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock may have left it out already, where the kernel counted it as a wait."""
    waiting = Deadline(10.0, [], ["no such flight record"])
    monkeypatch.setattr(KeptWaiting, "in_turn_s", 1000.0)
    assert waiting.until() - machine_time.now() <= 10.0


def test_a_rank_that_learns_late_of_a_failure_still_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Deadline(0.2, [], ["no such flight record"])
    late = waiting._since + 5 * 0.2
    monkeypatch.setattr(machine_time, "now", lambda: late)
    assert waiting.until() <= late
    waiting.cut_to(0.1)
    assert waiting.until() == pytest.approx(late + 0.1)


def test_a_rank_that_sends_its_answer_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Deadline(10.0, [], ["no such flight record"])
    at = waiting._since
    for second, given_up_at in ((8.0, 18.0), (45.0, 50.0)):  # and has an end
        monkeypatch.setattr(machine_time, "now", lambda second=second: at + second)
        waiting.note_progress()
        assert waiting.until() - at == pytest.approx(given_up_at)


@pytest.mark.parametrize(
    ("passed_s", "kept_s", "answered_at_s", "given_up_after_s"),
    [
        (10.0, 0.0, 0.0, 10.0),
        (50.0, 42.0, 0.0, 52.0),
        (95.0, 95.0, 0.0, 100.0),  # ten times ten seconds of silence
        (200.0, 191.0, 150.0, 241.0),
        (480.0, 480.0, 470.0, 500.0),
    ],
)
def test_what_ranks_wait_for_a_processor_is_not_counted_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, kept_s: float, answered_at_s: float, given_up_after_s: float
) -> None:
    waiting = Deadline(10.0, [], ["no such flight record"])
    waiting._answered_at = waiting._since + answered_at_s
    monkeypatch.setattr(KeptWaiting, "in_turn_s", kept_s)
    monkeypatch.setattr(KeptWaiting, "goes_on", lambda self: False)
    monkeypatch.setattr(machine_time, "now", lambda: waiting._since + passed_s)
    assert waiting.until() - waiting._since == pytest.approx(given_up_after_s)


def test_a_failure_leaves_the_others_twenty_times_their_time_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Deadline(10.0, [], ["no such flight record"])
    waiting.cut_to(1.0)
    monkeypatch.setattr(KeptWaiting, "in_turn_s", 1000.0)
    for seconds in (5.0, 9.5, 19.5):
        monkeypatch.setattr(machine_time, "now", lambda seconds=seconds: waiting._since + seconds)
        waiting.note_progress()
        assert waiting.until() - waiting._since == pytest.approx(min(20.0, seconds + 10.0, 2 * seconds + 1.0))


@pytest.mark.parametrize(
    ("passed_s", "kept_s", "ran_s", "starved"),
    [(95.0, 95.0, 0.25, ""), (100.0, 100.0, 0.25, "0.25 of 1e+02 s"), (100.0, 100.0, 10.0, ""), (10.0, 0.0, 0.0, "")],
    ids=["waits", "has waited", "computes", "silent"],
)
def test_ranks_are_starved_that_took_the_most_time_for_want_of_a_processor(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, kept_s: float, ran_s: float, starved: str
) -> None:
    waiting = Deadline(10.0, [], ["no such flight record"])
    monkeypatch.setattr(KeptWaiting, "in_turn_s", kept_s)
    monkeypatch.setattr(KeptWaiting, "ran_s", ran_s)
    monkeypatch.setattr(machine_time, "now", lambda: waiting._since + passed_s)
    waiting.until()
    words = "the machine let no thread of this host's ranks run for more than "
    assert waiting.starved() == (words + starved if starved else "")


def test_how_long_a_process_ran_is_what_the_kernel_counted_since_the_beginning() -> None:
    waits, began = KeptWaiting([os.getpid()]), time.process_time()
    while time.process_time() - began < 0.2:
        pass
    assert waits.ran_s == pytest.approx(time.process_time() - began, abs=0.05)
    assert KeptWaiting([]).ran_s == 0


def test_who_waits_for_long_looks_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(kept_waiting, "time", clock)
    looked = [clock.monotonic() for _ in seconds_of([os.getpid()], 2.0, pause_s=0.001, most_times=1.0)]
    pauses = [after - before for before, after in itertools.pairwise(looked)]
    assert pauses[0] == pytest.approx(0.001)
    assert max(pauses) == pytest.approx(0.01)
    assert all(pause < 0.0011 + 0.22 * (before - looked[0]) for pause, before in zip(pauses, looked, strict=False))
    assert 200 <= len(looked) < 300


def test_how_many_processors_are_idle_is_what_the_kernel_counted_since_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, times = Clock(), tmp_path / "stat"
    monkeypatch.setattr(processors, "time", clock)
    monkeypatch.setattr(processors, "_TIMES", str(times))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    times.write_text("cpu  700 0 300 5000 40 0 0 0 0 0\ncpu0 1 2 3 4\n")
    both = Processors()
    for ticks, num_idle in [(5010, 2.0), (5010, 0.0), (5015, 1.0)]:
        times.write_text(f"cpu  700 0 300 {ticks} 40 0 0 0 0 0\ncpu0 1 2 3 4\n")
        clock.sleep(0.05)
        assert both.num_idle() == pytest.approx(num_idle)
    times.unlink()
    assert Processors().num_idle() == 0
