"""Times of iterations, on a machine whose clock is set."""

from __future__ import annotations

import itertools
import time

import pytest

from ddp_impl.telemetry import Moment, Telemetry

_HOUR_NS = 3600 * 10**9


def test_durations_are_what_passed_though_the_wall_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = itertools.count(time.time_ns(), -_HOUR_NS)
    monkeypatch.setattr(time, "time_ns", lambda: next(wall))
    telemetry = Telemetry()
    started = time.perf_counter_ns()
    telemetry.begin()
    telemetry.current.backward_start = Moment.now()
    telemetry.current.first_launch = Moment.now()
    telemetry.current.last_launch = Moment.now()
    telemetry.end()
    passed = time.perf_counter_ns() - started
    data = telemetry.logging_data()
    durations = [value for name, value in data.items() if name.endswith("_time")]
    assert len(durations) == 8  # four, and their averages
    assert all(0 < int(duration) <= passed for duration in durations)
    assert data["backward_compute_time_start"] == int(data["forward_compute_time_start"]) - _HOUR_NS
