"""Random legal and illegal events: the table answers as documented, and an illegal event changes nothing."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ddp_impl.errors import IllegalEventError
from ddp_impl.reducer_state import TRANSITIONS, Action, BucketPhase, Event, Phase, ReducerState, diagram


def snapshot(state: ReducerState) -> dict[str, object]:
    return copy.deepcopy(vars(state))


class Iterations(RuleBasedStateMachine):
    """Plays a reducer with three buckets and compares with a model that is a handful of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ReducerState(rank=1, num_buckets=3)
        self.full: set[int] = set()
        self.launched: list[int] = []

    def expects_gradients(self) -> bool:
        return self.state.phase in (Phase.ARMED, Phase.REDUCING)

    @rule()
    @precondition(lambda self: self.state.phase in (Phase.IDLE, Phase.ARMED))
    def forward(self) -> None:
        was_idle = self.state.phase is Phase.IDLE
        actions = self.state.handle(Event.FORWARD)
        assert actions == ((Action.ARM,) if was_idle else (Action.WIDEN,))
        if was_idle:
            self.full.clear()
            self.launched.clear()

    @rule(bucket=st.integers(0, 2))
    @precondition(lambda self: self.expects_gradients())
    def bucket_full(self, bucket: int) -> None:
        if bucket in self.full:
            before = snapshot(self.state)
            with pytest.raises(IllegalEventError):
                self.state.handle(Event.BUCKET_FULL, bucket=bucket)
            assert snapshot(self.state) == before
            return
        assert self.state.handle(Event.BUCKET_FULL, bucket=bucket) == (Action.LAUNCH,)
        self.full.add(bucket)
        self.launched += self.state.take_launchable()
        expected = [index for index in range(3) if set(range(index + 1)) <= self.full]
        assert self.launched == expected
        if len(self.launched) == 3:
            self.state.handle(Event.LAST_LAUNCHED)

    @rule()
    def backward_end(self) -> None:
        was_reduced = self.state.phase is Phase.REDUCED
        assert (Action.FINALIZE in self.state.handle(Event.BACKWARD_END)) == was_reduced

    @rule()
    def reset(self) -> None:
        in_flight = self.state.phase in (Phase.REDUCING, Phase.REDUCED)
        assert (Action.ABANDON in self.state.handle(Event.RESET)) == in_flight

    @rule(event=st.sampled_from(list(Event)), bucket=st.integers(0, 2))
    def illegal(self, event: Event, bucket: int) -> None:
        if (self.state.phase, event) in TRANSITIONS:
            return
        before = snapshot(self.state)
        with pytest.raises(IllegalEventError, match=r"\[rank 1\]"):
            self.state.handle(event, bucket=bucket)
        assert snapshot(self.state) == before

    @invariant()
    def holds(self) -> None:
        self.state.check_invariants()


TestIterations = Iterations.TestCase


def test_last_launched_is_checked() -> None:
    state = ReducerState(rank=0, num_buckets=2)
    state.handle(Event.FORWARD)
    state.handle(Event.GRADIENT)
    with pytest.raises(IllegalEventError, match="2 buckets not launched"):
        state.handle(Event.LAST_LAUNCHED)


def test_error_says_what_where_and_when() -> None:
    state = ReducerState(rank=3, num_buckets=2)
    with pytest.raises(IllegalEventError) as caught:
        state.handle(Event.GRADIENT)
    assert str(caught.value) == (
        "[rank 3] 'gradient arrives' cannot happen while the reducer is idle (iteration 0, 0 of 2 buckets launched)"
    )


@given(st.permutations(range(4)))
def test_launch_order_is_index_order_whatever_fills_first(filling: list[int]) -> None:
    state = ReducerState(rank=0, num_buckets=4)
    state.handle(Event.FORWARD)
    launched: list[int] = []
    for bucket in filling:
        state.handle(Event.BUCKET_FULL, bucket=bucket)
        launched += state.take_launchable()
        state.check_invariants()
    assert launched == [0, 1, 2, 3]
    assert set(state.buckets) == {BucketPhase.LAUNCHED}


def test_replan_only_between_iterations() -> None:
    state = ReducerState(rank=0, num_buckets=1)
    state.handle(Event.FORWARD)
    with pytest.raises(IllegalEventError, match="rebuilt"):
        state.replan(2)


def test_every_phase_is_reachable_and_can_be_left() -> None:
    assert {following for following, _ in TRANSITIONS.values()} == set(Phase)
    for phase in Phase:
        assert any(start is phase and following is not phase for (start, _), (following, _) in TRANSITIONS.items())


def test_diagram_shows_every_transition() -> None:
    assert diagram().count("-->") == len(TRANSITIONS) + 1
