"""Where faults fire: at the place that was counted, and nowhere else."""

import contextlib

import pytest

from conformance.observation import Collective
from conformance.scenario import Fault
from conformance.workers.faults import FaultInjector, InjectedError

COLLECTIVE = Collective(0, "all_reduce", "default", (), ())


def raising(at: str, occurrence: int) -> tuple[FaultInjector, list[str]]:
    told: list[str] = []
    return FaultInjector([Fault("raise", 1, at, occurrence)], lambda: told.append("fires")), told


def test_the_nth_entry_into_a_phase() -> None:
    injector, told = raising("backward", 1)
    for step in range(2):
        injector.entered("forward", step, True)
        injector.entered("start", -1, True)
        with pytest.raises(InjectedError, match="rank 1 at backward") if step else contextlib.nullcontext():
            injector.entered("backward", step, True)
        assert (injector.num_fired, len(told)) == (step, step)
        injector.entered("start", -1, True)


def test_coming_back_to_a_phase_is_no_entry() -> None:
    injector, _ = raising("forward", 1)
    injector.entered("forward", 0, True)
    injector.entered("observe", 0, True)
    injector.entered("forward", 0, True)  # left observe
    injector.entered("start", -1, True)  # left forward
    assert injector.num_fired == 0
    with pytest.raises(InjectedError):
        injector.entered("forward", 1, True)


def test_the_nth_collective() -> None:
    injector, told = raising("collective", 2)
    injector.before_collective(COLLECTIVE)
    injector.before_collective(COLLECTIVE)
    assert told == []
    with pytest.raises(InjectedError):
        injector.before_collective(COLLECTIVE)
    injector.before_collective(COLLECTIVE)
    assert injector.num_fired == 1
