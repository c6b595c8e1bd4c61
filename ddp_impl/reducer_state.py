"""The reducer's state machine: a table of what may happen when, with no torch in it.

One iteration runs IDLE -> ARMED (a synchronised forward) -> REDUCING (gradients arrive, full buckets are launched in
index order) -> REDUCED (all launched) -> IDLE (the backward ended, gradients are averaged). Events enter through
`ReducerState.handle`, which validates first, changes second, and returns what the reducer has to do. The path of a
single gradient does not come here: it costs a counter in its bucket, and the table is entered when a bucket is full.
"""

from __future__ import annotations

from enum import Enum

from ddp_impl.errors import IllegalEventError


class Phase(Enum):
    """Where an iteration stands."""

    # Members are singletons; Enum would hash their names, in Python, at every look into the table.
    __hash__ = object.__hash__

    IDLE = "idle"
    ARMED = "armed"
    REDUCING = "reducing"
    REDUCED = "reduced"


class BucketPhase(Enum):
    """Where a bucket stands within an iteration."""

    FILLING = "filling"
    FULL = "full"  # complete, but an earlier bucket is not: launching now would break the order
    LAUNCHED = "launched"


class Event(Enum):
    """What can happen to an iteration."""

    __hash__ = object.__hash__

    FORWARD = "synchronised forward"
    BACKWARD = "backward begins"
    GRADIENT = "gradient arrives"
    BUCKET_FULL = "bucket is full"
    LAST_LAUNCHED = "last bucket launched"
    BACKWARD_END = "backward ended"
    RESET = "reset"


class Action(Enum):
    """What the reducer must do; LAUNCH: those of `take_launchable`."""

    ARM = "expect every gradient"
    WIDEN = "expect the gradients of this forward as well"
    LAUNCH = "launch buckets"
    FINALIZE = "wait, and hand out the averages"
    ABANDON = "forget what is in flight"


#: (phase, event) -> (next phase, actions). What is not here is illegal.
TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]] = {
    (Phase.IDLE, Event.FORWARD): (Phase.ARMED, (Action.ARM,)),
    # Several forwards before one backward: their losses are summed by the user, their gradients arrive once.
    (Phase.ARMED, Event.FORWARD): (Phase.ARMED, (Action.WIDEN,)),
    # The same outputs once more (retain_graph=True): gradients accumulate on the averages and are averaged again.
    (Phase.IDLE, Event.BACKWARD): (Phase.ARMED, (Action.ARM,)),
    (Phase.ARMED, Event.BACKWARD): (Phase.ARMED, ()),
    # A backward from another output may bring the gradients that the first one left out.
    (Phase.REDUCING, Event.BACKWARD): (Phase.REDUCING, ()),
    (Phase.REDUCED, Event.BACKWARD): (Phase.REDUCED, ()),
    (Phase.ARMED, Event.GRADIENT): (Phase.REDUCING, ()),
    (Phase.REDUCING, Event.GRADIENT): (Phase.REDUCING, ()),
    (Phase.ARMED, Event.BUCKET_FULL): (Phase.REDUCING, (Action.LAUNCH,)),
    (Phase.REDUCING, Event.BUCKET_FULL): (Phase.REDUCING, (Action.LAUNCH,)),
    (Phase.REDUCING, Event.LAST_LAUNCHED): (Phase.REDUCED, ()),
    # autograd.grad ends a backward in which no gradient was accumulated: still waiting for the real one.
    (Phase.IDLE, Event.BACKWARD_END): (Phase.IDLE, ()),
    (Phase.ARMED, Event.BACKWARD_END): (Phase.ARMED, ()),
    (Phase.REDUCING, Event.BACKWARD_END): (Phase.REDUCING, ()),
    (Phase.REDUCED, Event.BACKWARD_END): (Phase.IDLE, (Action.FINALIZE,)),
    (Phase.IDLE, Event.RESET): (Phase.IDLE, ()),
    (Phase.ARMED, Event.RESET): (Phase.IDLE, ()),
    (Phase.REDUCING, Event.RESET): (Phase.IDLE, (Action.ABANDON,)),
    (Phase.REDUCED, Event.RESET): (Phase.IDLE, (Action.ABANDON,)),
}


class ReducerState:
    """The present phase of the iteration and of each bucket; changed by `handle` alone."""

    def __init__(self, rank: int, num_buckets: int = 0) -> None:
        """Start idle with `num_buckets` buckets."""
        self.rank = rank
        self.phase = Phase.IDLE
        self.num_iterations = 0
        self.buckets = [BucketPhase.FILLING] * num_buckets
        self.num_launched = 0

    def handle(self, event: Event, *, bucket: int | None = None) -> tuple[Action, ...]:
        """Take `event`; return what must be done now.

        For BUCKET_FULL, `bucket` names it; the buckets to launch are then `take_launchable()`. Raises
        `IllegalEventError` and changes nothing when the table has no such entry.
        """
        entry = TRANSITIONS.get((self.phase, event))
        if entry is None:
            raise self._illegal(event)
        if event is Event.BUCKET_FULL:
            assert bucket is not None
            if self.buckets[bucket] is not BucketPhase.FILLING:
                raise self._illegal(event, f"bucket {bucket}, which is {self.buckets[bucket].value}")
            self.buckets[bucket] = BucketPhase.FULL
        elif event is Event.LAST_LAUNCHED and self.num_launched != len(self.buckets):
            raise self._illegal(event, f"{len(self.buckets) - self.num_launched} buckets not launched")
        self.phase, actions = entry
        if Action.ARM in actions:
            self.num_iterations += 1
        if self.phase is Phase.IDLE or Action.ARM in actions:
            self._empty_buckets()
        return actions

    def take_launchable(self) -> list[int]:
        """Return the full buckets that are next in order, marking them launched."""
        first = self.num_launched
        while self.num_launched < len(self.buckets) and self.buckets[self.num_launched] is BucketPhase.FULL:
            self.buckets[self.num_launched] = BucketPhase.LAUNCHED
            self.num_launched += 1
        return list(range(first, self.num_launched))

    def replan(self, num_buckets: int) -> None:
        """Take a new set of buckets; only between iterations."""
        if self.phase is not Phase.IDLE:
            raise self._illegal(Event.RESET, "buckets cannot be rebuilt while gradients are expected")
        self.buckets = [BucketPhase.FILLING] * num_buckets
        self.num_launched = 0

    def check_invariants(self) -> None:
        """Assert what holds after every event."""
        launched = [phase is BucketPhase.LAUNCHED for phase in self.buckets]
        assert launched == [index < self.num_launched for index in range(len(self.buckets))], "launched out of order"
        if self.num_launched < len(self.buckets):
            assert self.buckets[self.num_launched] is not BucketPhase.LAUNCHED
        if self.phase in (Phase.IDLE, Phase.ARMED):
            assert all(phase is BucketPhase.FILLING for phase in self.buckets), "a bucket outlived its iteration"
        if self.phase is Phase.REDUCED:
            assert self.num_launched == len(self.buckets), "reduced, but not everything was launched"

    def _empty_buckets(self) -> None:
        self.buckets = [BucketPhase.FILLING] * len(self.buckets)
        self.num_launched = 0

    def _illegal(self, event: Event, about: str = "") -> IllegalEventError:
        subject = f" ({about})" if about else ""
        return IllegalEventError(
            f"[rank {self.rank}] '{event.value}'{subject} cannot happen while the reducer is {self.phase.value} "
            f"(iteration {self.num_iterations}, {self.num_launched} of {len(self.buckets)} buckets launched)"
        )


def diagram() -> str:
    """Return the table as a Mermaid state diagram; `docs/reducer.md` shows it."""
    lines = ["stateDiagram-v2", "    [*] --> idle"]
    for (phase, event), (following, actions) in TRANSITIONS.items():
        done = f" / {', '.join(action.value for action in actions)}" if actions else ""
        lines.append(f"    {phase.value} --> {following.value}: {event.value}{done}")
    return "\n".join(lines) + "\n"
