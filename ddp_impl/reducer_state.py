"""The reducer's state machine: a table of what may happen when, with no torch in it.

An iteration without surprises runs IDLE -> ARMED (a synchronised forward ended) -> RUNNING (autograd reached one of its
outputs) -> REDUCING (the first gradient arrived; the reducer launches full buckets in index order) -> REDUCED (the
reducer launched the last one) -> IDLE (the backward ended, and the reducer hands out the averages).

Every event enters through `ReducerState.handle`, which validates first, changes second, and returns the actions that
the reducer performs. Of a backward's gradients only the first is an event, unless the reducer learns from the
iteration: all others cost a counter (`arrivals`), and the table is entered when a bucket is full.
"""

from __future__ import annotations

from enum import Enum

from ddp_impl.errors import IllegalEventError


class Phase(Enum):
    """Where an iteration stands."""

    # Members are singletons; Enum would hash their names, in Python, at every look into the table.
    __hash__ = object.__hash__

    IDLE = "idle"
    #: A forward ended; the reducer expects its gradients.
    ARMED = "armed"
    #: A gradient arrived although autograd has not reached an output of forward: of a parameter that the loss uses
    #: outside of forward, say. Full buckets are held back until the reducer knows which parameters are unused.
    EARLY = "early"
    #: A backward reached an output; none of its gradients has arrived.
    RUNNING = "running"
    #: That backward ended (`torch.autograd.grad`) or raised without a gradient. Unused parameters are settled.
    PROBED = "probed"
    #: Gradients arrive, and the reducer launches buckets.
    REDUCING = "reducing"
    #: The reducer launched all buckets; the backward goes on.
    REDUCED = "reduced"
    #: The backward ended, and gradients are missing.
    INCOMPLETE = "incomplete"
    #: A backward raised when gradients had arrived, and some ranks may have launched more than others; or a rank
    #: refused what others have taken for averages.
    BROKEN = "broken"


class BucketPhase(Enum):
    """Where a bucket stands within an iteration."""

    FILLING = "filling"
    FULL = "full"  # complete, but an earlier bucket is not: launching now would break the order
    LAUNCHED = "launched"


class Event(Enum):
    """What can happen to an iteration."""

    __hash__ = object.__hash__

    FORWARD = "synchronised forward"
    BACKWARD = "backward reaches an output"
    GRADIENT = "gradient arrives"
    BUCKET_FULL = "bucket is full"
    LAST_LAUNCHED = "last bucket launched"
    BACKWARD_END = "backward ended"
    BACKWARD_RAISED = "backward raised"
    REFUSED = "a rank refused"
    SHADOW = "joined rank shadows an iteration"
    RESET = "reset"


class Action(Enum):
    """What the reducer must do."""

    __hash__ = object.__hash__

    ARM = "expect every gradient"
    WIDEN = "expect the gradients of this forward as well"
    WATCH = "have autograd report the end of the backward"
    EXCLUDE = "take as unused what the outputs cannot reach"
    LAUNCH = "launch full buckets in order"
    ASK = "ask which parameters any rank used"
    SETTLE = "take as unused what has not come, if that is allowed"
    CONTRIBUTE_ZEROS = "launch buckets of zeros"
    FINALIZE = "wait, and hand out the averages"
    ABANDON = "forget what is in flight"
    LET_GO = "expect nothing: gradients that come are local"


#: (phase, event) -> (next phase, actions in order). What is not here is illegal.
TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]] = {
    (Phase.IDLE, Event.FORWARD): (Phase.ARMED, (Action.ARM,)),
    # Several forwards before one backward: the user sums their losses, and each gradient arrives once.
    (Phase.ARMED, Event.FORWARD): (Phase.ARMED, (Action.WIDEN,)),
    # The backward runs a forward itself.
    (Phase.RUNNING, Event.FORWARD): (Phase.PROBED, (Action.WIDEN,)),
    (Phase.PROBED, Event.FORWARD): (Phase.PROBED, (Action.WIDEN,)),
    # The same outputs once more (retain_graph=True): gradients accumulate on the averages and are averaged again.
    (Phase.IDLE, Event.BACKWARD): (Phase.RUNNING, (Action.ARM, Action.WATCH, Action.EXCLUDE)),
    (Phase.ARMED, Event.BACKWARD): (Phase.RUNNING, (Action.WATCH, Action.EXCLUDE)),
    (Phase.EARLY, Event.BACKWARD): (Phase.REDUCING, (Action.EXCLUDE, Action.LAUNCH)),
    (Phase.PROBED, Event.BACKWARD): (Phase.RUNNING, (Action.WATCH,)),
    # Every output reports; the first one counts.
    (Phase.RUNNING, Event.BACKWARD): (Phase.RUNNING, ()),
    (Phase.REDUCING, Event.BACKWARD): (Phase.REDUCING, ()),
    (Phase.REDUCED, Event.BACKWARD): (Phase.REDUCED, ()),
    # A backward from another output may bring the gradients that the first one left out.
    (Phase.INCOMPLETE, Event.BACKWARD): (Phase.REDUCING, (Action.WATCH,)),
    (Phase.ARMED, Event.GRADIENT): (Phase.EARLY, (Action.WATCH,)),
    (Phase.EARLY, Event.GRADIENT): (Phase.EARLY, ()),
    (Phase.RUNNING, Event.GRADIENT): (Phase.REDUCING, (Action.LAUNCH,)),
    (Phase.PROBED, Event.GRADIENT): (Phase.REDUCING, (Action.WATCH, Action.LAUNCH)),
    (Phase.REDUCING, Event.GRADIENT): (Phase.REDUCING, ()),
    (Phase.INCOMPLETE, Event.GRADIENT): (Phase.REDUCING, (Action.WATCH,)),
    (Phase.EARLY, Event.BUCKET_FULL): (Phase.EARLY, ()),
    # Every parameter of the bucket is unused; it waits for a gradient, which torch.autograd.grad will not bring.
    (Phase.RUNNING, Event.BUCKET_FULL): (Phase.RUNNING, ()),
    (Phase.REDUCING, Event.BUCKET_FULL): (Phase.REDUCING, (Action.LAUNCH,)),
    (Phase.INCOMPLETE, Event.BUCKET_FULL): (Phase.INCOMPLETE, (Action.LAUNCH,)),
    (Phase.REDUCING, Event.LAST_LAUNCHED): (Phase.REDUCED, ()),
    (Phase.INCOMPLETE, Event.LAST_LAUNCHED): (Phase.IDLE, (Action.ASK, Action.FINALIZE)),
    (Phase.RUNNING, Event.BACKWARD_END): (Phase.PROBED, ()),
    (Phase.REDUCING, Event.BACKWARD_END): (Phase.INCOMPLETE, (Action.SETTLE,)),
    # Asked no earlier, because ranks also tell of gradients that came too late.
    (Phase.REDUCED, Event.BACKWARD_END): (Phase.IDLE, (Action.ASK, Action.FINALIZE)),
    # Autograd reports the end more than once where a backward ran a forward, or where a user reset the reducer in it.
    (Phase.IDLE, Event.BACKWARD_END): (Phase.IDLE, ()),
    (Phase.ARMED, Event.BACKWARD_END): (Phase.ARMED, ()),
    (Phase.PROBED, Event.BACKWARD_END): (Phase.PROBED, ()),
    (Phase.INCOMPLETE, Event.BACKWARD_END): (Phase.INCOMPLETE, ()),
    # The user may catch the exception and go on under `no_sync`; a synchronised forward is refused.
    **{
        (phase, Event.BACKWARD_RAISED): (Phase.BROKEN, (Action.LET_GO,))
        for phase in (Phase.EARLY, Phase.REDUCING, Phase.REDUCED)
    },
    (Phase.RUNNING, Event.BACKWARD_RAISED): (Phase.PROBED, ()),
    **{
        (phase, Event.BACKWARD_RAISED): (phase, ())
        for phase in (Phase.IDLE, Phase.ARMED, Phase.PROBED, Phase.INCOMPLETE, Phase.BROKEN)
    },
    **{(phase, Event.REFUSED): (Phase.BROKEN, (Action.LET_GO,)) for phase in (Phase.IDLE, Phase.ARMED)},
    # The rank ran out of data, perhaps after a forward that no backward followed.
    **{
        (phase, Event.SHADOW): (Phase.IDLE, (Action.ARM, Action.CONTRIBUTE_ZEROS, Action.ASK, Action.FINALIZE))
        for phase in (Phase.IDLE, Phase.ARMED, Phase.PROBED)
    },
    (Phase.IDLE, Event.RESET): (Phase.IDLE, ()),
    (Phase.ARMED, Event.RESET): (Phase.IDLE, ()),
    **{
        (phase, Event.RESET): (Phase.IDLE, (Action.ABANDON,))
        for phase in (
            Phase.EARLY, Phase.RUNNING, Phase.PROBED, Phase.REDUCING, Phase.REDUCED, Phase.INCOMPLETE, Phase.BROKEN,
        )
    },
}  # fmt: skip


class ReducerState:
    """The present phase of the iteration and of each bucket; `handle`, `take_launchable` and `replan` change it."""

    def __init__(self, rank: int, num_buckets: int = 0) -> None:
        """Start idle with `num_buckets` buckets."""
        self.rank = rank
        self.phase = Phase.IDLE
        self.num_iterations = 0
        self.buckets = [BucketPhase.FILLING] * num_buckets
        self.num_launched = 0
        self.is_repeated = False  # no forward opened the iteration, but a backward from outputs of an earlier one

    @property
    def is_unfinished(self) -> bool:
        """Whether another forward would mix two iterations: gradients have arrived."""
        return self.phase not in (Phase.IDLE, Phase.ARMED, Phase.RUNNING, Phase.PROBED)

    def handle(self, event: Event, *, bucket: int | None = None) -> tuple[Action, ...]:
        """Take `event`; return the actions that the reducer must perform now, in order.

        For BUCKET_FULL, `bucket` names it; LAUNCH then means the buckets that `take_launchable` returns. Raises
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
        if event is Event.FORWARD or Action.ARM in actions:
            self.is_repeated = event is Event.BACKWARD
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
        if self.phase in (Phase.IDLE, Phase.ARMED):
            assert all(phase is BucketPhase.FILLING for phase in self.buckets), "a bucket outlived its iteration"
        if self.phase in (Phase.EARLY, Phase.RUNNING, Phase.PROBED):
            assert self.num_launched == 0, "a bucket was launched before a gradient came, or before it could be"
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
    """Return the table as a Mermaid state diagram, which `docs/reducer.md` contains."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.IDLE.value}"]
    for (phase, event), (following, actions) in TRANSITIONS.items():
        done = f" / {', '.join(action.value for action in actions)}" if actions else ""
        lines.append(f"    {phase.value} --> {following.value}: {event.value}{done}")
    return "\n".join(lines) + "\n"
