"""The table keeps its promises under random events, legal and illegal, and describes the documented life."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ddp_impl
from ddp_impl.base.errors import IllegalEventError
from ddp_impl.reducer.reducer_state import TRANSITIONS, Action, BucketPhase, Event, Phase, ReducerState, diagram

NUM_BUCKETS = 3
#: Events that the outside world sends as it likes; the others follow from what the reducer does.
FROM_OUTSIDE = (
    Event.FORWARD, Event.BACKWARD, Event.GRADIENT, Event.BACKWARD_END, Event.ALL_SENT, Event.BACKWARD_RAISED,
    Event.SHADOW, Event.RESET,
)  # fmt: skip


class Iterations(RuleBasedStateMachine):
    """Sends any event at any time and keeps a record of each iteration's actions, which the invariants judge."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ReducerState(rank=1, num_buckets=NUM_BUCKETS)
        self.done: list[Action] = []  # since the last ARM
        self.launched: list[int] = []
        self.is_open = False  # an iteration was armed, and neither finalized nor abandoned
        self.is_watched = False
        self.late: set[int] = set()
        self.unused: set[int] = set()  # buckets that a backward leaves out and the reducer settles when it is over

    @initialize(late=st.sets(st.integers(0, NUM_BUCKETS - 1)), unused=st.sets(st.integers(0, NUM_BUCKETS - 1)))
    def some_buckets_are_late_and_some_unused(self, late: set[int], unused: set[int]) -> None:
        self.late, self.unused = late, unused

    def send(self, event: Event, bucket: int = 0) -> None:
        before = copy.deepcopy(vars(self.state))
        try:
            actions = self.state.handle(event, bucket=bucket)
        except IllegalEventError as error:
            message = str(error)
        else:
            self.perform_all(event, actions)
            return
        assert vars(self.state) == before, "an illegal event changed something"
        assert message.startswith(f"[rank 1] '{event.value}'")
        assert before["phase"].value in message

    def perform_all(self, event: Event, actions: tuple[Action, ...]) -> None:
        if event in (Event.BACKWARD_END, Event.BACKWARD_RAISED, Event.FORWARD, Event.SHADOW):
            self.is_watched = False  # a forward: the backward before it may have raised
        assert event is not Event.FORWARD or actions in ((Action.ARM,), ()), "a forward is not counted"
        for action in actions:
            self.perform(action, event)
        if event is Event.SHADOW:
            assert actions[0] is Action.ARM, "counts of the iteration before would be used"
            assert {Action.CONTRIBUTE_ZEROS, Action.ASK} <= set(actions), "the other ranks would wait"
        if event is Event.RESET:
            self.is_open = self.is_watched = False

    def perform(self, action: Action, event: Event) -> None:
        if action is Action.ARM:
            assert not self.is_open or event is Event.SHADOW, "armed twice"
            self.is_open, self.done, self.launched = True, [], []
        if action is Action.FORECAST:
            assert not self.launched, "ranks would tell each other what is known"
        if action is Action.WATCH:
            assert not self.is_watched, "one backward is watched twice"
            self.is_watched = True
        if action is Action.SETTLE:
            for bucket in self.unused:
                if self.state.buckets[bucket] is BucketPhase.FILLING:
                    self.send(Event.BUCKET_FULL, bucket)
        if action is Action.LAUNCH:
            assert Action.FORECAST in self.done, "a bucket left before unused parameters were known"
            self.launch()
        if action is Action.ASK:
            assert Action.ASK not in self.done
            assert len(self.launched) == NUM_BUCKETS or event is Event.SHADOW, "asked between two buckets"
        if action is Action.FINALIZE:
            assert Action.ASK in [*self.done, action], "averages were handed out before usage was known"
            assert self.is_open, "averages were handed out twice"
            left_all = len(self.launched) == NUM_BUCKETS or Action.CONTRIBUTE_ZEROS in self.done
            assert left_all, "a bucket was left out"
            self.is_open = False
        self.done.append(action)

    def launch(self) -> None:
        if not self.launched and BucketPhase.FULL in self.state.buckets:
            self.state.hold_back(self.late)
        launched = self.state.take_launchable()
        if self.state.phase is Phase.INCOMPLETE:
            self.state.release()
            launched += self.state.take_launchable()
        self.launched += launched
        order = sorted(range(NUM_BUCKETS), key=lambda index: (index in self.late, index))
        assert self.launched == order[: len(self.launched)], "buckets left in another order"
        if launched and len(self.launched) == NUM_BUCKETS:
            self.done.append(Action.LAUNCH)
            self.send(Event.LAST_LAUNCHED)

    @rule(event=st.sampled_from(FROM_OUTSIDE))
    def anything(self, event: Event) -> None:
        self.send(event)

    @rule(bucket=st.integers(0, NUM_BUCKETS - 1))
    @precondition(lambda self: self.state.phase is not Phase.INCOMPLETE)  # there it settles, or a gradient comes
    def bucket_full(self, bucket: int) -> None:
        self.send(Event.BUCKET_FULL, bucket)

    @rule()
    @precondition(lambda self: self.state.num_launched < NUM_BUCKETS)
    def too_early(self) -> None:
        before = copy.deepcopy(vars(self.state))
        with pytest.raises(IllegalEventError):
            self.state.handle(Event.LAST_LAUNCHED)
        assert vars(self.state) == before

    @invariant()
    def holds(self) -> None:
        self.state.check_invariants()

    @invariant()
    def a_running_backward_will_report_its_end(self) -> None:
        if self.state.phase in (Phase.EARLY, Phase.RUNNING, Phase.REDUCING, Phase.REDUCED):
            assert self.is_watched, "nobody will hand out the averages"

    @invariant()
    def full_buckets_leave_as_soon_as_it_is_their_turn(self) -> None:
        waits = self.state.phase in (Phase.EARLY, Phase.RUNNING, Phase.PROBED, Phase.BROKEN)
        if not waits and self.state.num_launched < NUM_BUCKETS - self.state.num_late:
            assert self.state.buckets[self.state.launch_order[self.state.num_launched]] is BucketPhase.FILLING

    @invariant()
    def an_iteration_is_open_unless_idle(self) -> None:
        assert self.is_open == (self.state.phase is not Phase.IDLE)


TestIterations = Iterations.TestCase

F, B, G, E, A = Event.FORWARD, Event.BACKWARD, Event.GRADIENT, Event.BACKWARD_END, Event.ALL_SENT
LIVES: dict[str, list[tuple[Event | int, str, tuple[Action, ...]]]] = {
    "one bucket after the other": [
        (F, "armed", (Action.ARM,)),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (G, "reducing", (Action.LAUNCH,)),
        (1, "reducing", (Action.LAUNCH,)),
        (0, "reduced", (Action.LAUNCH,)),
        (B, "reduced", ()),
        (E, "sent", (Action.ASK,)),
        (A, "idle", (Action.FINALIZE,)),
    ],
    "the loss uses a parameter outside of forward": [
        (F, "armed", (Action.ARM,)),
        (G, "early", (Action.WATCH,)),
        (0, "early", ()),
        (B, "reducing", (Action.FORECAST, Action.LAUNCH)),
        (1, "reduced", (Action.LAUNCH,)),
        (E, "sent", (Action.ASK,)),
        (A, "idle", (Action.FINALIZE,)),
    ],
    "this rank uses no parameter": [
        (F, "armed", (Action.ARM,)),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (G, "reducing", (Action.LAUNCH,)),  # that of the anchor
        (E, "sent", (Action.SETTLE, Action.LAUNCH, Action.ASK)),
        (A, "idle", (Action.FINALIZE,)),
    ],
    "torch.autograd.grad where a whole bucket is unused": [
        (F, "armed", (Action.ARM,)),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (0, "running", ()),
        (E, "probed", ()),
        (F, "probed", ()),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (G, "reducing", (Action.LAUNCH,)),
        (1, "reduced", (Action.LAUNCH,)),
        (E, "sent", (Action.ASK,)),
        (A, "idle", (Action.FINALIZE,)),
    ],
    "gradients are missing, and no other backward brings them": [
        (F, "armed", (Action.ARM,)),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (G, "reducing", (Action.LAUNCH,)),
        (0, "reducing", (Action.LAUNCH,)),
        (E, "sent", (Action.SETTLE, Action.LAUNCH, Action.ASK)),
        (A, "idle", (Action.FINALIZE,)),
    ],
    "two backwards share the parameters": [
        (F, "armed", (Action.ARM,)),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (G, "reducing", (Action.LAUNCH,)),
        (0, "reducing", (Action.LAUNCH,)),
        (E, "incomplete", (Action.SETTLE, Action.LAUNCH)),
        (A, "incomplete", ()),
        (B, "reducing", (Action.WATCH,)),
        (G, "reducing", ()),
        (1, "reduced", (Action.LAUNCH,)),
        (E, "sent", (Action.ASK,)),
        (A, "idle", (Action.FINALIZE,)),
    ],
    "torch.autograd.grad before backward, then the same outputs again": [
        (F, "armed", (Action.ARM,)),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (E, "probed", ()),
        (F, "probed", ()),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (G, "reducing", (Action.LAUNCH,)),
        (0, "reducing", (Action.LAUNCH,)),
        (1, "reduced", (Action.LAUNCH,)),
        (E, "sent", (Action.ASK,)),
        (A, "idle", (Action.FINALIZE,)),
        (B, "running", (Action.ARM, Action.WATCH, Action.FORECAST)),
    ],
    "the user's code fails in backward": [
        (F, "armed", (Action.ARM,)),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (Event.BACKWARD_RAISED, "probed", ()),
        (B, "running", (Action.WATCH, Action.FORECAST)),
        (G, "reducing", (Action.LAUNCH,)),
        (0, "reducing", (Action.LAUNCH,)),
        (Event.BACKWARD_RAISED, "broken", (Action.LET_GO,)),
        (Event.RESET, "idle", (Action.ABANDON,)),
    ],
    "a rank without data, and another group": [
        (F, "armed", (Action.ARM,)),
        (Event.SHADOW, "sent", (Action.ARM, Action.CONTRIBUTE_ZEROS, Action.ASK)),
        (A, "idle", (Action.FINALIZE,)),
        (Event.RESET, "idle", ()),
        (F, "armed", (Action.ARM,)),
        (G, "early", (Action.WATCH,)),
        (Event.RESET, "idle", (Action.ABANDON,)),
    ],
}


#: Those in which another backward may bring what is missing.
INCOMPLETE = {"two backwards share the parameters"}


@pytest.mark.parametrize("life", list(LIVES))
def test_life_of_an_iteration(life: str) -> None:
    """Every step names an event (a number: this bucket is full), the phase after it, and the actions asked for."""
    state = ReducerState(rank=0, num_buckets=2)
    for event, phase, expected in LIVES[life]:
        full = isinstance(event, int)
        done: list[Action] = []
        asked = list(state.handle(Event.BUCKET_FULL, bucket=event) if isinstance(event, int) else state.handle(event))
        while asked:
            done.append(asked.pop(0))
            if done[-1] is Action.SETTLE and life not in INCOMPLETE:
                for bucket, now in enumerate(state.buckets):
                    if now is BucketPhase.FILLING:
                        state.handle(Event.BUCKET_FULL, bucket=bucket)
            if done[-1] is Action.LAUNCH and state.take_launchable() and state.num_launched == 2:
                asked += state.handle(Event.LAST_LAUNCHED)
        assert (state.phase.value, tuple(done)) == (phase, expected), f"after {event} (full bucket: {full})"
        state.check_invariants()


def test_last_launched_is_checked() -> None:
    state = ReducerState(rank=0, num_buckets=2)
    for event in (Event.FORWARD, Event.BACKWARD, Event.GRADIENT):
        state.handle(event)
    with pytest.raises(IllegalEventError, match="2 buckets not launched"):
        state.handle(Event.LAST_LAUNCHED)


def test_no_forward_while_buckets_are_in_flight() -> None:
    state = ReducerState(rank=0, num_buckets=2)
    for event in (Event.FORWARD, Event.BACKWARD):
        state.handle(event)
    assert not state.is_unfinished
    state.handle(Event.GRADIENT)
    state.handle(Event.BUCKET_FULL, bucket=0)
    state.take_launchable()
    state.handle(Event.BACKWARD_END)
    assert state.phase is Phase.INCOMPLETE
    assert state.is_unfinished
    for event in (Event.FORWARD, Event.SHADOW):
        with pytest.raises(IllegalEventError, match="while the reducer is incomplete"):
            state.handle(event)


def test_error_says_what_where_and_when() -> None:
    state = ReducerState(rank=3, num_buckets=2)
    with pytest.raises(IllegalEventError) as caught:
        state.handle(Event.GRADIENT)
    assert str(caught.value) == (
        "[rank 3] 'gradient arrives' cannot happen while the reducer is idle (iteration 0, 0 of 2 buckets launched)"
    )


@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_launch_order_is_index_order_whatever_fills_first_and_late_buckets_wait(
    filling: list[int], late: set[int]
) -> None:
    state = ReducerState(rank=0, num_buckets=4)
    for event in (Event.FORWARD, Event.BACKWARD, Event.GRADIENT):
        state.handle(event)
    state.hold_back(late)
    launched: list[int] = []
    for bucket in filling:
        state.handle(Event.BUCKET_FULL, bucket=bucket)
        launched += state.take_launchable()
        state.check_invariants()
    assert launched == sorted(set(range(4)) - late)
    state.handle(Event.BACKWARD_END)
    state.release()
    launched += state.take_launchable()
    assert launched == sorted(set(range(4)) - late) + sorted(late)
    assert set(state.buckets) == {BucketPhase.LAUNCHED}


def test_replan_only_between_iterations() -> None:
    state = ReducerState(rank=0, num_buckets=1)
    state.handle(Event.FORWARD)
    with pytest.raises(IllegalEventError, match="rebuilt"):
        state.replan(2)


def _reachable(start: Phase) -> set[Phase]:
    found, new = {start}, [start]
    while new:
        phase = new.pop()
        following = {to for (origin, _), (to, _) in TRANSITIONS.items() if origin is phase} - found
        found |= following
        new += following
    return found


def test_every_phase_is_reachable_and_leads_back() -> None:
    assert _reachable(Phase.IDLE) == set(Phase)
    for phase in Phase:
        assert Phase.IDLE in _reachable(phase)
        following, actions = TRANSITIONS[phase, Event.RESET]
        assert following is Phase.IDLE, "a reset is always possible"
        assert (Action.ABANDON in actions) == (phase not in (Phase.IDLE, Phase.ARMED)), "what is in flight is forgotten"


def test_the_reducer_performs_every_action_and_sends_every_event() -> None:
    tree = ast.parse((Path(ddp_impl.__file__).parent / "reducer.py").read_text())
    named = [
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    cases = {
        node.value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Attribute)
    }
    assert cases == {action.name for action in Action}
    assert {action for _, actions in TRANSITIONS.values() for action in actions} == set(Action)
    assert {name for owner, name in named if owner == "Event"} == {event.name for event in Event}
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_the_diagram_contains_every_transition() -> None:
    assert diagram().count("-->") == len(TRANSITIONS) + 1
