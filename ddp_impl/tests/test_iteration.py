"""The rules of an iteration keep their promises under random events, and its buckets leave in order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddp_impl
from ddp_impl.base.errors import IllegalEventError
from ddp_impl.reducer.iteration import TRANSITIONS, Action, Event, Iteration, Progress, Run, rule
from ddp_impl.reducer.reducer import _PERFORM

ARM, WATCH, ANNOUNCE, LAUNCH = Action.ARM, Action.WATCH, Action.ANNOUNCE, Action.LAUNCH
RESOLVE, EXCHANGE, FINALIZE, DISARM = Action.RESOLVE, Action.EXCHANGE_USAGE, Action.FINALIZE, Action.DISARM
#: Events, the place that they lead to, and the actions that they ask for.
LIVES: dict[str, tuple[str, Progress, Run, tuple[Action, ...]]] = {
    "one bucket after the other": (
        "FORWARD BACKWARD GRADIENT LAST_LAUNCHED BACKWARD_END ALL_SENT",
        Progress.IDLE, Run.NONE, (ARM, WATCH, ANNOUNCE, LAUNCH, EXCHANGE, FINALIZE),
    ),
    "the loss uses a parameter outside of forward": (
        "FORWARD GRADIENT BACKWARD LAST_LAUNCHED BACKWARD_END ALL_SENT",
        Progress.IDLE, Run.NONE, (ARM, WATCH, ANNOUNCE, LAUNCH, EXCHANGE, FINALIZE),
    ),
    "gradients are missing": (
        "FORWARD BACKWARD GRADIENT BACKWARD_END ALL_SENT",
        Progress.COLLECTS, Run.OVER, (ARM, WATCH, ANNOUNCE, LAUNCH, RESOLVE, LAUNCH),
    ),
    "another backward brings them": (
        "FORWARD BACKWARD GRADIENT BACKWARD_END GRADIENT LAST_LAUNCHED BACKWARD_END",
        Progress.SENT, Run.OVER, (ARM, WATCH, ANNOUNCE, LAUNCH, RESOLVE, LAUNCH, WATCH, EXCHANGE),
    ),
    "torch.autograd.grad": (
        "FORWARD BACKWARD BACKWARD_END FORWARD BACKWARD GRADIENT",
        Progress.COLLECTS, Run.RUNS, (ARM, WATCH, ANNOUNCE, WATCH, ANNOUNCE, LAUNCH),
    ),
    "the same outputs once more": (
        "BACKWARD GRADIENT", Progress.COLLECTS, Run.RUNS, (ARM, WATCH, ANNOUNCE, LAUNCH)
    ),
    "the user's code fails before a gradient": (
        "FORWARD BACKWARD BACKWARD_RAISED", Progress.AWAITS, Run.OVER, (ARM, WATCH, ANNOUNCE)
    ),
    "the user's code fails in backward": (
        "FORWARD BACKWARD GRADIENT BACKWARD_RAISED",
        Progress.BROKEN, Run.OVER, (ARM, WATCH, ANNOUNCE, LAUNCH, DISARM),
    ),
    "a rank without data": ("FORWARD SHADOW ALL_SENT", Progress.IDLE, Run.NONE, (ARM, ARM, FINALIZE)),
    "a rank refuses": ("REFUSED", Progress.BROKEN, Run.OVER, (DISARM,)),
}  # fmt: skip


@pytest.mark.parametrize(("events", "progress", "run", "expected"), LIVES.values(), ids=list(LIVES))
def test_life_of_an_iteration(events: str, progress: Progress, run: Run, expected: tuple[Action, ...]) -> None:
    iteration = Iteration(0, launch_order=range(2))
    actions = [action for name in events.split() for action in iteration.enter(Event[name])]
    assert (iteration.progress, iteration.run, tuple(actions)) == (progress, run, expected)


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_invariants_under_any_events(events: list[Event]) -> None:
    iteration, done = Iteration(1, number=7, launch_order=range(2)), list[Action]()
    is_open = is_watched = False
    for event in events:
        before = (iteration.progress, iteration.run)
        if rule(*before, event) is None:
            with pytest.raises(IllegalEventError, match=rf"\[rank 1\] '{event.value}' .* is {before[0].value}, "):
                iteration.enter(event)
            assert (iteration.progress, iteration.run) == before, "an illegal event changed something"
            continue
        actions, progress, run = iteration.enter(event), iteration.progress, iteration.run
        if event in (Event.BACKWARD_END, Event.BACKWARD_RAISED, Event.FORWARD, Event.SHADOW, Event.RESET):
            is_watched = False  # a forward: the backward before it may have raised
        for action in actions:
            if action is ARM:
                assert not is_open or event is Event.SHADOW, "opened twice"
                is_open, done = True, []
            assert action is not WATCH or not is_watched, "one backward is watched twice"
            is_watched |= action is WATCH
            assert action is not LAUNCH or ANNOUNCE in [*done, *actions], "a bucket left before ranks were told"
            assert action is not EXCHANGE or EXCHANGE not in done, "asked twice"
            assert action is not FINALIZE or (is_open and (progress, run) == (Progress.IDLE, Run.NONE))
            is_open &= action is not FINALIZE
            done.append(action)
        is_open &= event is not Event.RESET
        assert run not in (Run.UNSEEN, Run.RUNS) or is_watched, "nobody will hand out the averages"
        assert not is_open or progress is not Progress.IDLE, "nobody will hand them out"
        assert is_open or progress in (Progress.IDLE, Progress.BROKEN), "handed out, and not over"


def test_every_rule_is_in_the_table_and_every_place_leads_back() -> None:
    for progress in Progress:
        for run in Run:
            assert rule(progress, run, Event.RESET) == (Progress.IDLE, Run.NONE, ()), "a reset is always possible"
            for event in Event:
                assert TRANSITIONS.get((progress, run, event)) == rule(progress, run, event)
    for event in (Event.FORWARD, Event.SHADOW):  # while buckets are in flight
        assert rule(Progress.COLLECTS, Run.OVER, event) is None


def test_the_reducer_performs_every_action_and_sends_every_event() -> None:
    tree = ast.parse((Path(ddp_impl.__file__).parent / "reducer" / "reducer.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    assert set(_PERFORM) == set(Action)
    assert {action for _, _, actions in TRANSITIONS.values() for action in actions} == set(Action)
    sent = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "Event"}
    assert sent == {event.name for event in Event} - {"RESET"}


@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_buckets_leave_in_index_order_whatever_fills_first_and_late_ones_wait(
    filling: list[int], late: set[int]
) -> None:
    iteration = Iteration(0, launch_order=range(4))
    iteration.launch_after_backward(late)
    early = sorted(set(range(4)) - late)
    launched: list[int] = []
    for bucket in filling:
        iteration.full.add(bucket)
        launched += iteration.take_launchable()
        assert launched == early[: len(launched)]
        assert len(launched) == len(early) or early[len(launched)] not in iteration.full, "its turn, and it waits"
        assert iteration.num_launchable_in_backward == len(early) - len(launched)
    iteration.num_late = 0
    assert launched + iteration.take_launchable() == iteration.launched == early + sorted(late)


def test_no_bucket_is_held_back_when_one_has_left() -> None:
    iteration = Iteration(3, launch_order=range(2))
    iteration.full.add(0)
    assert iteration.take_launchable() == [0]
    with pytest.raises(IllegalEventError, match=r"\[rank 3\] 'hold a bucket back'.* 1 of 2 buckets launched"):
        iteration.launch_after_backward([1])
