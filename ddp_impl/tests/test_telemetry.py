"""Times of iterations, on a machine whose clock is set."""

from __future__ import annotations

import itertools
import time

import pytest

from ddp_impl.base.telemetry import Telemetry, now_ns

_HOUR_NS = 3600 * 10**9
#: By how much two clocks that are read one after the other may be apart.
_TICK_NS = 10**7


def test_durations_are_what_passed_though_the_wall_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = itertools.count(time.time_ns(), -_HOUR_NS)
    monkeypatch.setattr(time, "time_ns", lambda: next(wall))
    telemetry = Telemetry()
    started = time.perf_counter_ns()
    telemetry.current.forward_start = now_ns()
    telemetry.current.backward_start = now_ns()
    telemetry.current.first_launch = now_ns()
    telemetry.current.last_launch = now_ns()
    telemetry.end()
    passed = time.perf_counter_ns() - started
    data = telemetry.logging_data()
    durations = [value for name, value in data.items() if name.endswith("_time")]
    assert len(durations) == 8  # four, and their averages
    assert all(0 < int(duration) <= passed for duration in durations)
    began, followed = (int(data[f"{part}_compute_time_start"]) for part in ("forward", "backward"))
    assert followed - began == data["forward_compute_time"]


def test_moments_are_on_the_wall_clock() -> None:
    before = time.time_ns()
    telemetry = Telemetry()
    telemetry.current.forward_start = now_ns()
    telemetry.end()
    data = telemetry.logging_data()
    assert before - _TICK_NS <= int(data["forward_compute_time_start"]) <= time.time_ns() + _TICK_NS
    assert data["backward_comm_time_start"] == 0  # nothing was launched
