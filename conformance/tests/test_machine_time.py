"""Seconds in which the machine stands still, as a paused or frozen one does, are nobody's silence."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.tests.clock import Clock
from conformance.tests.processes import processes_under
from conformance.waiting import machine_time
from conformance.waiting.limits import TURN_S
from conformance.waiting.loop import MachineClock
from conformance.waiting.machine_time import wait_for

#: Much later than a process is woken that wanted to be.
_STOP_S = 1.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(machine_time, "time", clock)
    monkeypatch.setattr(machine_time, "_stops", [])
    monkeypatch.setattr(machine_time, "_stopped_s", 0.0)
    monkeypatch.setattr(machine_time, "_listened_at", math.inf)
    return clock


def test_a_wait_ends_when_something_is_found_and_after_its_time(clock: Clock) -> None:
    asked: list[float | None] = []

    def look(turn_s: float | None) -> str:
        asked.append(turn_s)
        clock.sleep(turn_s or 0.0)
        return "it" if len(asked) == 3 else ""

    before = clock.at
    assert wait_for(look, 60.0) == "it"
    assert asked == [TURN_S] * 3
    assert clock.at - before == 3 * TURN_S
    assert wait_for(look, 0.0) == ""
    assert asked[3:] == [0.0]
    assert wait_for(lambda turn_s: turn_s is None, None)


def test_what_nobody_could_hear_does_not_count(clock: Clock) -> None:
    """Four turns make a second; the first one ends as late as if the machine had been stopped."""
    turns: list[float] = []

    def look(turn_s: float | None) -> None:
        turns.append(turn_s or 0.0)
        clock.sleep((turn_s or 0.0) + (_STOP_S if len(turns) == 1 else 0.0))

    before, began = machine_time.now(), clock.at
    wait_for(look, 4 * TURN_S)
    assert turns == [TURN_S] * 4
    assert machine_time.now() - before == 4 * TURN_S
    assert clock.at - began == 4 * TURN_S + _STOP_S


def test_a_moment_before_a_stop_lies_the_fewer_seconds_back(clock: Clock) -> None:
    def look(turn_s: float | None) -> bool:
        clock.sleep((turn_s or 0.0) + _STOP_S)
        return True

    early, began = machine_time.now(), clock.at
    wait_for(look, TURN_S)
    assert machine_time.moment(began) == early
    assert machine_time.now() - early == TURN_S


def test_threads_that_meet_one_stop_count_it_once(clock: Clock) -> None:
    """Each wants to be woken at another moment, and all are woken by the end of the same stop, in any order."""
    shares = (0.2, 0.6, 1.0)
    all_sleep = threading.Barrier(len(shares), action=lambda: clock.sleep(TURN_S + _STOP_S))

    def look(turn_s: float | None) -> bool:
        all_sleep.wait()
        return True

    before = machine_time.now()
    threads = [threading.Thread(target=wait_for, args=(look, TURN_S * share)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = machine_time.now() - before
    assert any(took_s == pytest.approx(TURN_S * share) for share in shares), took_s


def test_what_this_process_did_not_listen_to_counts_only_until_it_listens_again(clock: Clock) -> None:
    """The machine may have been stopped between two waits, when nobody wanted to be woken."""
    wait_for(lambda turn_s: True, TURN_S)
    before = machine_time.now()
    clock.sleep(_STOP_S)
    assert machine_time.now() - before == _STOP_S
    machine_time.resume()
    assert machine_time.now() == before
    clock.sleep(TURN_S)
    machine_time.resume()  # a short while is no stop
    assert machine_time.now() - before == TURN_S


def test_a_coroutine_that_sleeps_is_not_woken_earlier_because_the_machine_stood_still(clock: Clock) -> None:
    machine, slept = MachineClock(), []
    until = machine.current_time() + 3 * TURN_S
    while machine.current_time() < until:
        slept.append(machine.deadline_to_sleep_time(until))
        clock.sleep(slept[-1] + (_STOP_S if len(slept) == 2 else 0.0))
    assert slept == [TURN_S] * 3
    clock.sleep(_STOP_S)  # something else is done
    assert machine.current_time() == until
    assert machine.deadline_to_sleep_time(until - 1.0) == 0.0


def test_moments_before_within_and_after_stops(clock: Clock) -> None:
    num_stops = machine_time._MOST_STOPS + 10
    machine_time.resume()
    early = machine_time.now()
    for _ in range(num_stops):
        clock.sleep(TURN_S)
        machine_time.resume()
        clock.sleep(_STOP_S)
        machine_time.resume()
    assert len(machine_time._stops) == machine_time._MOST_STOPS
    last = early + num_stops * TURN_S
    assert machine_time.now() == pytest.approx(last)
    for ago_s, earlier_s in ((0.5, 0.0), (_STOP_S, 0.0), (_STOP_S + TURN_S / 2, TURN_S / 2)):
        assert machine_time.moment(clock.at - ago_s) == pytest.approx(last - earlier_s)
        three_stops_s = 3 * (_STOP_S + TURN_S)
        assert machine_time.moment(clock.at - three_stops_s - ago_s) == pytest.approx(last - 3 * TURN_S - earlier_s)
    kept_s = machine_time._MOST_STOPS * (_STOP_S + TURN_S)
    assert machine_time.moment(clock.at - kept_s) == pytest.approx(last - machine_time._MOST_STOPS * TURN_S)


_DEADLINE_S = 1.0
#: Longer than the deadline, and than an attached controller waits for a late answer.
_LONG_STOP_S = 2 * _DEADLINE_S + 3.0
#: Ranks of one scenario, on one machine or attached, that go on in small steps.
_RUN = """
import sys, threading
from conformance.backends.gloo import GLOO
from conformance.subjects.subject import KNOWN
from conformance.tests import test_attached
from conformance.tests.test_pool import PROGRAMS, scenario
from conformance.workers.attached_controller import AttachedController
from conformance.workers.attached_messages import FromAgent, ToAgent
from conformance.workers.channel import pair
from conformance.workers.controller import Controller

if sys.argv[1] == "attached":
    ours, theirs = zip(*(pair(FromAgent, ToAgent) for _ in range(2)))
    for index in range(2):
        threading.Thread(target=test_attached._serve, args=(theirs[index], index), daemon=True).start()
    controller = AttachedController(GLOO, ours, "127.0.0.1")
else:
    controller = Controller(GLOO, preload=(PROGRAMS,))
deadline_s = float(sys.argv[2])
with controller:
    controller.run(scenario("idle"), KNOWN["torch"])
    print("begins", flush=True)
    steps = {"times": 12, "seconds": deadline_s / 4}
    seen = controller.run(scenario("slow", arguments=steps, deadline_s=deadline_s), KNOWN["torch"])
    print(*(str(one.fate) for one in seen.values()), flush=True)
"""


@pytest.fixture
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, request.param, str(_DEADLINE_S)],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.nightly
@pytest.mark.parametrize("running", ["alone", "attached"], indirect=True)
def test_a_machine_that_is_stopped_for_longer_than_the_deadline_changes_nothing(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert running.stdout is not None
    assert running.stdout.readline() == "begins\n"
    time.sleep(_DEADLINE_S / 2)
    everybody = [*reversed(processes_under(tmp_path)), running.pid]  # ranks, zygotes, the controller, which wakes last
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(_LONG_STOP_S)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)
    assert running.stdout.readline() == "returned returned\n"
