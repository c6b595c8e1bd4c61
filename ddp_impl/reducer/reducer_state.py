"""The reducer's state machine: a table of what may happen when, with no torch in it.

An iteration without surprises runs IDLE -> ARMED (a synchronised forward ended) -> RUNNING (autograd reached one of its
outputs) -> REDUCING (the first gradient arrived; the reducer launches full buckets in index order) -> REDUCED (the
reducer launched the last one) -> SENT (the backward ended, and nothing more will be sent) -> IDLE (all wrappers of the
backward have sent their buckets, and the reducer hands out the averages).

Which collective comes next in the group is a function of what all its ranks know. So a bucket leaves within the
backward only if every rank knows that it leaves there on all of them; the others are *late* (`hold_back`). Those leave
when the backward is over, in index order behind the rest. What the ranks know, and when: `forecast`.

What the table does not hold, and why:

- how many gradients are awaited (`arrivals`): every gradient counts it down, and an entry of the table would cost more;
- what an iteration has sent and refused, and what this backward's number is (`iteration`): values, and no phases;
- the gradients of a backward under `no_sync` (`local_backward`): it may run while the reducer awaits another one, or
  be a part of that one, so it is no phase of it;
- what earlier backwards left to be averaged, and what ranks have promised (`parameter_usage`): both outlive iterations;
- that this rank's backward raised before its first gradient (`finish_check`): it is about the other ranks.

Every event enters through `ReducerState.handle`, which validates first, changes second, and returns the actions that
the reducer performs. Of a backward's gradients only the first is an event, unless the reducer learns from the
iteration: all others cost a counter (`arrivals`), and the table is entered when a bucket is full.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from ddp_impl.base.errors import IllegalEventError


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
    #: The backward ended and the reducer sent all that it had to; other wrappers of the backward may not have.
    SENT = "sent"
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
    ALL_SENT = "every wrapper of the backward has sent its buckets"
    BACKWARD_RAISED = "backward raised"
    REFUSED = "a rank refused"
    SHADOW = "joined rank shadows an iteration"
    RESET = "reset"


class Action(Enum):
    """What the reducer must do."""

    __hash__ = object.__hash__

    ARM = "expect every gradient"
    WATCH = "have autograd report the end of the backward"
    FORECAST = "tell ranks which gradients this one expects"
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
    (Phase.ARMED, Event.FORWARD): (Phase.ARMED, ()),
    # The backward runs a forward itself.
    (Phase.RUNNING, Event.FORWARD): (Phase.PROBED, ()),
    (Phase.PROBED, Event.FORWARD): (Phase.PROBED, ()),
    # The same outputs once more (retain_graph=True): gradients accumulate on the averages and are averaged again.
    (Phase.IDLE, Event.BACKWARD): (Phase.RUNNING, (Action.ARM, Action.WATCH, Action.FORECAST)),
    (Phase.ARMED, Event.BACKWARD): (Phase.RUNNING, (Action.WATCH, Action.FORECAST)),
    (Phase.EARLY, Event.BACKWARD): (Phase.REDUCING, (Action.FORECAST, Action.LAUNCH)),
    (Phase.PROBED, Event.BACKWARD): (Phase.RUNNING, (Action.WATCH, Action.FORECAST)),
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
    (Phase.INCOMPLETE, Event.BUCKET_FULL): (Phase.INCOMPLETE, ()),
    (Phase.REDUCING, Event.LAST_LAUNCHED): (Phase.REDUCED, ()),
    (Phase.INCOMPLETE, Event.LAST_LAUNCHED): (Phase.SENT, (Action.ASK,)),
    (Phase.RUNNING, Event.BACKWARD_END): (Phase.PROBED, ()),
    (Phase.REDUCING, Event.BACKWARD_END): (Phase.INCOMPLETE, (Action.SETTLE, Action.LAUNCH)),
    # Asked no earlier, because ranks also tell of gradients that came too late.
    (Phase.REDUCED, Event.BACKWARD_END): (Phase.SENT, (Action.ASK,)),
    (Phase.SENT, Event.ALL_SENT): (Phase.IDLE, (Action.FINALIZE,)),
    # A wrapper that took part had nothing to send, or gradients of it are missing, or the user reset it in a hook.
    **{
        (phase, Event.ALL_SENT): (phase, ())
        for phase in (Phase.IDLE, Phase.ARMED, Phase.PROBED, Phase.INCOMPLETE, Phase.BROKEN)
    },
    # Autograd reports the end more than once where a backward ran a forward, or where a user reset the reducer in it.
    (Phase.IDLE, Event.BACKWARD_END): (Phase.IDLE, ()),
    (Phase.ARMED, Event.BACKWARD_END): (Phase.ARMED, ()),
    (Phase.PROBED, Event.BACKWARD_END): (Phase.PROBED, ()),
    (Phase.INCOMPLETE, Event.BACKWARD_END): (Phase.INCOMPLETE, ()),
    # The user may catch the exception and go on under `no_sync`; a synchronised forward is refused.
    **{
        (phase, Event.BACKWARD_RAISED): (Phase.BROKEN, (Action.LET_GO,))
        for phase in (Phase.EARLY, Phase.REDUCING, Phase.REDUCED, Phase.SENT)
    },
    (Phase.RUNNING, Event.BACKWARD_RAISED): (Phase.PROBED, ()),
    **{
        (phase, Event.BACKWARD_RAISED): (phase, ())
        for phase in (Phase.IDLE, Phase.ARMED, Phase.PROBED, Phase.INCOMPLETE, Phase.BROKEN)
    },
    **{(phase, Event.REFUSED): (Phase.BROKEN, (Action.LET_GO,)) for phase in (Phase.IDLE, Phase.ARMED)},
    # The rank ran out of data, perhaps after a forward that no backward followed.
    **{
        (phase, Event.SHADOW): (Phase.SENT, (Action.ARM, Action.CONTRIBUTE_ZEROS, Action.ASK))
        for phase in (Phase.IDLE, Phase.ARMED, Phase.PROBED)
    },
    (Phase.IDLE, Event.RESET): (Phase.IDLE, ()),
    (Phase.ARMED, Event.RESET): (Phase.IDLE, ()),
    **{
        (phase, Event.RESET): (Phase.IDLE, (Action.ABANDON,))
        for phase in (
            Phase.EARLY, Phase.RUNNING, Phase.PROBED, Phase.REDUCING, Phase.REDUCED, Phase.SENT, Phase.INCOMPLETE,
            Phase.BROKEN,
        )
    },
}  # fmt: skip


class ReducerState:
    """The present phase of the iteration and of each bucket.

    `launch_order`: the indices of all buckets in the order in which they leave; the last `num_late` are held back.
    `handle`, `hold_back`, `release`, `take_launchable` and `replan` change it.
    """

    def __init__(self, rank: int, num_buckets: int = 0) -> None:
        """Start idle with `num_buckets` buckets."""
        self.rank = rank
        self.phase = Phase.IDLE
        self.num_iterations = 0
        self.buckets = [BucketPhase.FILLING] * num_buckets
        self.num_launched = 0
        self.launch_order = list(range(num_buckets))
        self.num_late = 0
        self.is_repeated = False  # no forward opened the iteration, but a backward from outputs of an earlier one

    @property
    def is_unfinished(self) -> bool:
        """Whether another forward would mix two iterations: gradients have arrived."""
        return self.phase not in (Phase.IDLE, Phase.ARMED, Phase.RUNNING, Phase.PROBED)

    @property
    def num_sure(self) -> int:
        """How many buckets are left that leave within the backward."""
        return len(self.buckets) - self.num_late - self.num_launched

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

    def hold_back(self, late: Collection[int]) -> None:
        """Let the buckets with these indices leave behind all others, when the backward is over."""
        assert self.num_launched == 0, "a bucket has been launched in another order"
        order = range(len(self.buckets))
        self.launch_order = [index for index in order if index not in late] + sorted(late)
        self.num_late = len(late)

    def release(self) -> None:
        """Let the late buckets leave; the backward is over."""
        assert self.phase is Phase.INCOMPLETE, "the backward may bring more gradients"
        self.num_late = 0

    def take_launchable(self) -> list[int]:
        """Return the full buckets that are next in order and not held back, marking them launched."""
        first = last = self.num_launched
        while last < len(self.buckets) - self.num_late and self.buckets[self.launch_order[last]] is BucketPhase.FULL:
            self.buckets[self.launch_order[last]] = BucketPhase.LAUNCHED
            last += 1
        self.num_launched = last
        return self.launch_order[first:last]

    def replan(self, num_buckets: int) -> None:
        """Take a new set of buckets; only between iterations."""
        if self.phase is not Phase.IDLE:
            raise self._illegal(Event.RESET, "buckets cannot be rebuilt while gradients are expected")
        self.buckets = [BucketPhase.FILLING] * num_buckets
        self._empty_buckets()

    def check_invariants(self) -> None:
        """Assert what holds after every event."""
        launched = [self.buckets[index] is BucketPhase.LAUNCHED for index in self.launch_order]
        assert launched == [place < self.num_launched for place in range(len(self.buckets))], "launched out of order"
        if self.phase in (Phase.IDLE, Phase.ARMED):
            assert all(phase is BucketPhase.FILLING for phase in self.buckets), "a bucket outlived its iteration"
        if self.phase in (Phase.EARLY, Phase.RUNNING, Phase.PROBED):
            assert self.num_launched == 0, "a bucket was launched before a gradient came, or before it could be"
        if self.phase in (Phase.REDUCING, Phase.REDUCED):
            assert self.num_launched <= len(self.buckets) - self.num_late, "a late bucket left within the backward"
        if self.phase is Phase.REDUCED:
            assert self.num_launched == len(self.buckets), "reduced, but not everything was launched"

    def _empty_buckets(self) -> None:
        self.buckets = [BucketPhase.FILLING] * len(self.buckets)
        self.num_launched = self.num_late = 0
        self.launch_order = list(range(len(self.buckets)))

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
