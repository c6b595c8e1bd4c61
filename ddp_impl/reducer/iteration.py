"""The lifetimes of a reducer: `Iteration`, `Backward`, `Learnt`; and the rules by which an iteration goes on.

An iteration lasts from the forward that opens it until its averages are handed out. It stands on two axes: its own
progress, and that of the backward that it takes part in. Without surprises they run

    idle -> awaits (a synchronised forward ended) -> awaits, runs (a backward reached one of its outputs)
         -> collects (the first gradient arrived; full buckets leave in order) -> sent (the last bucket left)
         -> sent, over (the backward ended) -> idle (every wrapper of the backward has sent; averages are handed out)

Each lifetime is a new object, so that nothing of the last one can be forgotten in a reset.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ddp_impl.base.errors import IllegalEventError, ReductionError
from ddp_impl.base.options import BucketCaps
from ddp_impl.buckets.bucket import Bucket
from ddp_impl.buckets.gradients import Hidden
from ddp_impl.torch_internals.tensors import nodes_behind
from ddp_impl.wire.round import Answer, Round


class _Singletons(Enum):
    # Enum would hash the names of its members, in Python, at every look into a table.
    __hash__ = object.__hash__


class Progress(_Singletons):
    """How far an iteration is."""

    IDLE = "idle"
    #: A forward ended; the reducer expects its gradients.
    AWAITS = "expecting gradients"
    #: A gradient arrived.
    COLLECTS = "collecting gradients"
    #: Every bucket has left.
    SENT = "waiting for what it sent"
    #: A backward raised when gradients had arrived, and some ranks may have launched more than others; or a rank
    #: refused what others have taken for averages.
    BROKEN = "broken"
    #: Every wrapper of the backward has sent, and the user finalizes by hand.
    HELD = "waiting for finalize_backward"


class Run(_Singletons):
    """How far the backward is that the iteration takes part in."""

    NONE = "before any backward"
    #: A gradient arrived although the backward reached no output of forward: of a parameter that the loss uses
    #: outside of forward, say. Full buckets are held back until the backward reaches an output or ends.
    UNSEEN = "in a backward that reached no output"
    RUNS = "in a backward"
    #: It ended or raised: `torch.autograd.grad` brings no gradient, and a loss may bring only some.
    OVER = "after a backward"


class Event(_Singletons):
    """What can happen to an iteration."""

    FORWARD = "synchronised forward"
    BACKWARD = "backward reaches an output"
    GRADIENT = "gradient arrives"
    LAST_LAUNCHED = "last bucket launched"
    BACKWARD_END = "backward ended"
    ALL_SENT = "every wrapper of the backward has sent its buckets"
    LEFT_TO_USER = "every wrapper of the backward has sent its buckets, and the user finalizes by hand"
    BY_HAND = "the user finalizes by hand"
    BACKWARD_RAISED = "backward raised"
    REFUSED = "a rank refused"
    SHADOW = "joined rank shadows an iteration"
    RESET = "reset"


class Action(_Singletons):
    """What the reducer must do then, in this order."""

    ARM = "open an iteration: expect every gradient"
    WATCH = "have autograd report the end of the backward"
    ANNOUNCE = "exchange which gradients are certain, and count as unused what no rank will use"
    LAUNCH = "launch full buckets in order"
    RESOLVE = "count as unused what has not arrived, if that is allowed"
    EXCHANGE_USAGE = "exchange which parameters any rank used"
    HIDE = "let nobody read gradients"
    FINALIZE = "wait, and hand out the averages"
    DISARM = "expect nothing: gradients that arrive are local"


Following = tuple[Progress, Run, tuple[Action, ...]]


def rule(progress: Progress, run: Run, event: Event) -> Following | None:
    """Return where `event` leads from there and the actions that it asks for; None if it cannot happen."""
    idle, awaits, collects = progress is Progress.IDLE, progress is Progress.AWAITS, progress is Progress.COLLECTS
    sent, broken = progress is Progress.SENT, progress is Progress.BROKEN
    runs, over = run is Run.RUNS, run is Run.OVER
    match event:
        case Event.FORWARD if idle:
            return Progress.AWAITS, Run.NONE, (Action.ARM,)
        # Several forwards before one backward: the user sums their losses. Or the backward runs a forward itself.
        case Event.FORWARD if awaits:
            return progress, Run.NONE if run is Run.NONE else Run.OVER, ()
        case Event.BACKWARD if runs:  # every output reports; the first one counts
            return progress, run, ()
        # After one that is over: another backward may bring the gradients that the first one left out.
        case Event.BACKWARD if collects:
            return progress, Run.RUNS, (Action.WATCH,) if over else (Action.ANNOUNCE, Action.LAUNCH)
        # From idle: the same outputs once more (retain_graph=True). Gradients accumulate on the averages.
        case Event.BACKWARD if idle or awaits:
            return Progress.AWAITS, Run.RUNS, (*(Action.ARM,) * idle, Action.WATCH, Action.ANNOUNCE)
        case Event.GRADIENT if awaits or collects:
            unseen = run in (Run.NONE, Run.UNSEEN)
            launches = (Action.LAUNCH,) * (awaits and not unseen)
            watches = (Action.WATCH,) * (run in (Run.NONE, Run.OVER))
            return Progress.COLLECTS, Run.UNSEEN if unseen else Run.RUNS, watches + launches
        case Event.LAST_LAUNCHED if collects and run is not Run.UNSEEN:
            return Progress.SENT, run, (Action.EXCHANGE_USAGE,) * over
        # Not before the backward ends, because ranks also report gradients that arrived too late.
        case Event.BACKWARD_END if runs and not broken:
            ends = {Progress.COLLECTS: (Action.RESOLVE, Action.LAUNCH), Progress.SENT: (Action.EXCHANGE_USAGE,)}
            return progress, Run.OVER, ends.get(progress, ())
        # Autograd reports an end more than once where a backward ran a forward, or a user reset the reducer in it.
        case Event.BACKWARD_END if run is not Run.UNSEEN and not (sent or broken):
            return progress, run, ()
        case Event.ALL_SENT if sent and over:
            return Progress.IDLE, Run.NONE, (Action.FINALIZE,)
        case Event.LEFT_TO_USER if sent and over:
            return Progress.HELD, Run.OVER, (Action.HIDE,)
        case Event.BY_HAND if progress is Progress.HELD:
            return Progress.IDLE, Run.NONE, (Action.FINALIZE,)
        # A wrapper that took part had nothing to send, or lacks gradients, or the user reset it in a hook.
        case Event.ALL_SENT | Event.LEFT_TO_USER if not runs and run is not Run.UNSEEN:
            return progress, run, ()
        # The user may catch the exception and go on under `no_sync`; a synchronised forward is refused.
        case Event.BACKWARD_RAISED if sent or (collects and not over):
            return Progress.BROKEN, Run.OVER, (Action.DISARM,)
        case Event.BACKWARD_RAISED:
            return progress, Run.OVER if runs else run, ()
        case Event.REFUSED if run is Run.NONE:
            return Progress.BROKEN, Run.OVER, (Action.DISARM,)
        # The rank ran out of data, perhaps after a forward that no backward followed.
        case Event.SHADOW if (idle or awaits) and not runs:
            return Progress.SENT, Run.OVER, (Action.ARM,)
        case Event.RESET:
            return Progress.IDLE, Run.NONE, ()
        case _:
            return None


TRANSITIONS: dict[tuple[Progress, Run, Event], Following] = {
    (progress, run, event): following
    for progress in Progress
    for run in Run
    for event in Event
    if (following := rule(progress, run, event)) is not None
}


@dataclass(eq=False, slots=True)
class Iteration:
    """One iteration: where it stands, what its forwards returned, which buckets left, what ranks exchanged.

    `is_repeated`: no forward opened it, but a backward from outputs of an earlier one. `num_forwards`: how many its
    gradients come from. `context_id`: the torch.distributed.autograd context of forward. `is_announced`: the backward
    will report when it reaches an output; `is_reached`: it has. `outputs`: the marks on what its forwards returned, as
    long as anything else keeps their graphs alive; there are none where no other wrapper must begin with this one.

    `launch_order`: the indices of all buckets in the order in which they leave; the last `num_late` are held back until
    the backward is over. `full`: buckets that are complete; `launched`: those that left; `skipped`: those that no rank
    will use. `in_flight`: for each bucket that left the tensor that it left with and the Work or future.

    `unused`: the parameters that this rank's synchronised backward does not use. `forecast`: the exchange of what is
    certain to arrive, on its way; `has_forecast`: the ranks have made it, or are about to. `usage`: the exchange of
    what was used, on its way; `reads_usage`: this rank waits for its answer. `used_anywhere[i]`: whether any rank used
    parameter i; None until ranks have exchanged it, and until then all count as used; `is_exchanged`: they have, in
    this iteration. `refusal`: the error of a rank that cannot average, for the exchange of usage.

    `arrived`: in an iteration that is learnt from, the place of each parameter's last gradient (`company.Order`).
    `to_step`: the buckets whose averages were handed out when the backward ended, and which parameters some rank used.
    `hidden`: gradients that the user may not read before they are final.
    """

    rank: int
    number: int = 0
    launch_order: Sequence[int] = ()
    progress: Progress = Progress.IDLE
    run: Run = Run.NONE
    is_repeated: bool = False
    num_forwards: int = 0
    context_id: int | None = None
    is_announced: bool = False
    is_reached: bool = False
    outputs: list[weakref.ref[Any]] = field(default_factory=list)
    num_late: int = 0
    full: set[int] = field(default_factory=set)
    launched: list[int] = field(default_factory=list)
    skipped: Collection[int] = ()
    in_flight: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    unused: set[int] = field(default_factory=set)
    forecast: Round | None = None
    has_forecast: bool = False
    usage: Round | None = None
    reads_usage: bool = False
    used_anywhere: Sequence[bool] | None = None
    is_exchanged: bool = False
    refusal: ReductionError | None = None
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)
    to_step: list[tuple[Bucket, Sequence[bool] | None]] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)

    def enter(self, event: Event) -> tuple[Action, ...]:
        """Go on by `event`; return the actions to perform. Raises `IllegalEventError` where it cannot happen."""
        following = TRANSITIONS.get((self.progress, self.run, event))
        if following is None:
            raise self.illegal(event.value)
        self.progress, self.run, actions = following
        return actions

    def illegal(self, what: str) -> IllegalEventError:
        """Return the error for `what` cannot happen now."""
        return IllegalEventError(
            f"[rank {self.rank}] '{what}' cannot happen while the reducer is {self.progress.value}, {self.run.value} "
            f"(iteration {self.number}, {len(self.launched)} of {len(self.launch_order)} buckets launched)"
        )

    @property
    def awaits_backward(self) -> bool:
        """Whether a synchronised forward is over and its backward has not begun."""
        return self.progress is Progress.AWAITS and self.run is not Run.RUNS

    @property
    def is_incomplete(self) -> bool:
        """Whether the backward is over and gradients are missing."""
        return self.progress is Progress.COLLECTS and self.run is Run.OVER

    @property
    def is_probed(self) -> bool:
        """Whether a backward brought no gradient: `torch.autograd.grad`, perhaps on this rank alone."""
        return self.progress is Progress.AWAITS and self.run is Run.OVER

    @property
    def num_launchable_in_backward(self) -> int:
        """How many buckets are left that leave within the backward."""
        return len(self.launch_order) - self.num_late - len(self.launched)

    def launch_after_backward(self, late: Collection[int]) -> None:
        """Let the buckets with these indices leave behind all others, when the backward is over."""
        if self.launched:
            raise self.illegal("hold a bucket back")
        if late or self.num_late:
            prompt = [index for index in range(len(self.launch_order)) if index not in late]
            self.launch_order = prompt + sorted(late)
            self.num_late = len(late)

    def take_launchable(self) -> list[int]:
        """Return the full buckets that are next in order and not held back, and count them as launched."""
        first = last = len(self.launched)
        end = len(self.launch_order) - self.num_late
        while last < end and self.launch_order[last] in self.full:
            last += 1
        taken = list(self.launch_order[first:last])
        self.launched += taken
        return taken

    def note_outputs(self, tensors: Iterable[Tensor]) -> None:
        """Remember what one more forward returned, if it is marked."""
        nodes: Iterable[Any] = chain.from_iterable(map(nodes_behind, tensors))
        marks = [weakref.ref(node) for node in nodes if isinstance(node, BackwardCFunction)]
        self.outputs = [known for known in self.outputs if known() is not None] + marks

    @property
    def output_nodes(self) -> list[Node]:
        """The nodes of all outputs that are known and still there."""
        return [node for known in self.outputs if (node := known()) is not None]


@dataclass(eq=False, slots=True)
class Backward:
    """A run of autograd's engine; `has_named_missing`: an error has, of what is missing; `arrived`: of a local one."""

    number: int = -1
    has_named_missing: bool = False
    is_compiled: bool = False
    arrived: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Promise:
    """Of a static graph: `used[i]`, a rank's synchronised backward uses parameter i; `alike[i]`, all equally often."""

    used: list[bool]
    alike: list[bool]


@dataclass(eq=False, slots=True)
class Learnt:
    """What the reducer has learnt of its ranks and gradients; until it is reset, when all of it is forgotten.

    `caps`: those of the present buckets; `has_rebuilt_buckets`: they follow rank 0's order. `order`: rank 0's, behind
    the number of its wrapper, until buckets are planned by it; `order_exchange`: on its way. `in_order[i]`: gradient i
    arrives on every rank at the same place, or on none; empty until ranks have compared. `promise`: what ranks
    exchanged of a static graph. `last_unused`: what the last iteration left out; `looks_static`: every iteration so
    far left out the same. `last_usage`: what ranks exchanged last of their use, read or on its way (`unread`).
    """

    caps: BucketCaps
    has_rebuilt_buckets: bool = False
    order: list[int] = field(default_factory=list)
    order_exchange: Round | None = None
    in_order: Sequence[bool] = ()
    promise: Promise | None = None
    last_unused: set[int] | None = None
    looks_static: bool = True
    last_usage: Answer | None = None
    unread: deque[Round] = field(default_factory=deque)
