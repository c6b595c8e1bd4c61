"""The reducer: turns what autograd reports into events, and the state machine's actions into collectives.

A parameter's hook runs once per gradient and is the hot path: it counts down (`arrivals`) and does nothing else. A full
bucket is an event of the state machine, which returns the actions to perform. The reducer hands out the averages in a
callback that autograd runs when the backward is over, so that gradients are final when `backward()` returns.

Theory of operation. A DDP is not alone in its group: other wrappers and the user's own collectives share it, before,
within and after the backward. *Which collective comes next in a group is a function of what all its ranks know*, never
of when this rank's gradients came, of what this rank uses, of what it remembers, or of which wrappers it still holds.

==========================  ======================================================  =================================
moment                      what every rank knows                                   what is sent then
==========================  ======================================================  =================================
forward                     all ranks run it: it is collective                      buffers
backward reaches an output  all ranks run this backward                             with `find_unused_parameters`,
                                                                                    which gradients are sure to come
                                                                                    (`forecast`), by all wrappers
                                                                                    whose backward it is (`backwards`)
a bucket is full            without that option, and of a static graph: what each   the bucket, if all ranks await the
                            iteration brings, and whether in one order; with it:    same gradients of it, and all
                            the forecast, and whether it could have left in one     such before it have left, those of
                            order in the last iteration                             wrappers that were built later, too
                                                                                    (`backwards.may_send`)
the backward is over        nothing else will come                                  the late buckets, in index order,
                                                                                    what was used, and once rank 0's
                                                                                    order, and whether all have it;
                                                                                    wrappers in the order of their
                                                                                    construction
==========================  ======================================================  =================================

A rank decides by itself when it waits, and what for: nothing is sent because a wait ended. The averages are handed out
when all wrappers of the backward have sent everything, so that what a bucket collects is what the backward brought.

Gradients that do not come are found when the backward is over. That alone makes the values right; the forecast only
lets buckets leave earlier. So opaque outputs, partial losses and functions that hide a backward of their own need no
further rules; of several forwards before one backward all buckets are late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl.autograd import backwards
from ddp_impl.autograd.anchor import Anchor
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.autograd.threads import BackwardEnds, one_thread_at_a_time, without_grad
from ddp_impl.base import messages
from ddp_impl.base.logs import is_verbose, milestone
from ddp_impl.base.options import ReducerOptions
from ddp_impl.base.telemetry import NEVER, now_ns
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.reducer.absences import Absences
from ddp_impl.reducer.finish_check import FinishCheck
from ddp_impl.reducer.iteration import Backward, Iteration
from ddp_impl.reducer.local_backward import LocalBackward
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reducer_parts import ReducerParts
from ddp_impl.reducer.reducer_state import Action, BucketPhase, Event, Phase
from ddp_impl.reducer.reducer_surface import ReducerSurface
from ddp_impl.reducer.reduction import BucketReduction
from ddp_impl.torch_internals.autograd import (
    brought_by_backward,
    current_backward,
    current_distributed_context_id,
    in_compiled_backward,
)
from ddp_impl.wire.groups import rank_in, size_of
from ddp_impl.wire.peers import Peers


class Reducer(ReducerSurface):
    """Averages the gradients of `members` over `group`; every rank must build it with equal members and options."""

    def __init__(
        self,
        members: Sequence[ManagedParameter],
        group: dist.ProcessGroup,
        device: torch.device,
        options: ReducerOptions,
        peers: Peers | None = None,
        *,
        in_company: bool = True,
        copied: backwards.Construction = (),
    ) -> None:
        """Plan one bucket per kind of gradient and listen to every parameter; see `Participant` and `construction`."""
        self.parts = parts = ReducerParts.of(members, device, rank_in(group))
        self.members, self.device, self.buckets = parts.members, parts.device, parts.buckets
        self.state, self.arrivals, self.usage = parts.state, parts.arrivals, parts.usage
        self.search, self.telemetry = parts.search, parts.telemetry
        self.planning = BucketPlanning(parts, options)
        if has_threads := len(parts.devices) > 1:
            one_thread_at_a_time(self, "_handle", "_take_reported_gradient", "send_what_waits")
        self._hooks = AutogradHooks(
            self.members, self.arrivals, parts.early_moves, self._bucket_full, self._take_reported_gradient
        )
        self._anchor = Anchor(device, self._anchor_reached)
        self.reduction = BucketReduction(parts, options, self._hooks.shared)
        self.reduction.reduce_over(group, Peers(group) if peers is None else peers)
        self.absences = Absences(parts, self.reduction, self._hooks, self._anchor)
        self.construction, self.in_company = backwards.construction(copied), in_company
        self._backward = Backward()  # the last one that this wrapper took part in
        self._ends = BackwardEnds(drops_late=device.type != "cpu" or has_threads)
        self._local = LocalBackward(self, self._ends, self._hooks.shared)
        self._finish = FinishCheck(
            parts, self.reduction, self.absences, self._ends, refused=partial(self._handle, Event.REFUSED)
        )
        self.before_backward: Callable[[], None] = lambda: None  # what the wrapper has to check when forward is over
        self.in_use: Callable[[], object] = lambda: None  # what outputs keep alive until their backward has run
        backwards.watch_for(self)

    # -- what the wrapper calls ---------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """Before a synchronised forward: check that the last reduction is complete, rebuild buckets if it is time.

        All ranks must call it. Raises `ReductionError` when gradients of the last iteration are missing.
        """
        self.check_finished()
        if self.state.phase is Phase.PROBED and self.state.is_repeated:
            # torch.autograd.grad, perhaps on this rank alone: others would rebuild buckets now without it.
            self._handle(Event.RESET)
        self.telemetry.begin()
        self.rebuild_buckets()

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """After a synchronised forward: expect gradients when a backward comes to `outputs`."""
        outputs = list(outputs)
        if not outputs:  # called by hand, as accelerate does to synchronise the backward of a forward under `no_sync`
            self._local.num_triggers += 1
        self._handle(Event.FORWARD)
        iteration = self.reduction.iteration
        iteration.num_forwards += 1
        iteration.context_id = current_distributed_context_id()
        backwards.keep_company(self)
        if backwards.has_an_order(self):
            iteration.know_outputs(outputs)
        self._hooks.captures = iteration.context_id is not None
        self.parts.early_moves.movable = iteration.context_id is None
        if self._hooks.captures:
            self._hooks.listen_to_nodes(self.search.nodes)
        iteration.is_announced |= self._hooks.on_backward(outputs, partial(self._output_reached, self.in_use()))

    def forward_was_local(self, outputs: Iterable[Tensor]) -> None:
        """After a forward under `no_sync`: keep its gradients local, even if a synchronised one awaits its backward."""
        self.usage.follows_local = True
        self._hooks.on_backward(outputs, partial(self._local.begin, self._local.num_triggers))

    def check_finished(self) -> None:
        """Raise `ReductionError`, naming parameters, when a backward has begun and its reduction is not complete."""
        self._finish.check(self._backward)

    def between_backwards(self, what: str) -> AbstractContextManager[None]:
        """See `FinishCheck.between_backwards`."""
        return self._finish.between_backwards(self._backward, what)

    def wrapper_is_gone(self) -> None:
        """Average only the backward of outputs that are left; hold no more of the wrapper's."""
        self._local.is_orphan, self.before_backward = True, lambda: None

    def remove_hooks(self) -> None:
        """Stop listening to the parameters; gradients stay local from now on."""
        self._hooks.remove()
        self._anchor.let_go()

    def reset(self, group: dist.ProcessGroup) -> None:
        """Forget an unfinished iteration and reduce over `group` from now on; all its ranks must call it.

        The reducer forgets what it has learnt too, buckets included: ranks that are new in the group know nothing of
        it. Gradients that wait for their first reduction go on waiting. Raises `ReductionError` where gradients of the
        last backward are missing and nobody has heard so yet: when it is forgotten, nothing says that those which came
        are no averages.
        """
        if self.state.phase is Phase.INCOMPLETE and not self._backward.told_missing:
            self.check_finished()
        self._handle(Event.RESET)
        self._finish.raised_early = False
        self.state.rank = rank_in(group)
        self.reduction.reduce_over(group, Peers(group))
        # New storage, too: an abandoned collective may still be writing into the old one.
        self.planning.begin_to_learn(self.reduction.options)

    @without_grad
    def shadow_iteration(self) -> None:
        """Take part in an iteration of ranks that still have data, contributing zeros.

        The reducer hands out averages on this rank as well: an optimizer that is sharded over ranks
        (`ZeroRedundancyOptimizer`) steps its shard here too.
        """
        self._handle(Event.SHADOW)
        self._exchange_order(is_over=False)
        self.all_have_sent()
        self.all_have_handed_out()

    @property
    def group(self) -> dist.ProcessGroup:
        """Over which gradients are averaged."""
        return self.reduction.group

    @property
    def peers(self) -> Peers:
        """The ranks of the group."""
        return self.reduction.peers

    @property
    def ranks_may_differ(self) -> bool:
        """Whether ranks tell each other what they use, before an iteration's gradients come and after."""
        return self.reduction.ranks_may_differ

    def rebuild_buckets(self) -> None:
        """See `BucketPlanning.rebuild`."""
        self.planning.rebuild(self.group, self.peers, self.between_backwards)

    # -- events -------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, bucket: int | None = None) -> None:
        """Enter `event` into the state machine and perform its actions."""
        for action in self.state.handle(event, bucket=bucket):
            match action:
                case Action.ARM:
                    self._arm()
                case Action.WATCH:
                    self._watch_backward()
                case Action.FORECAST:
                    self._expect()
                case Action.LAUNCH:
                    self._launch_full_buckets()
                case Action.ASK:
                    self.reduction.ask_usage()
                case Action.SETTLE:
                    for full in self.absences.when_backward_is_over():
                        self._bucket_full(full)
                case Action.CONTRIBUTE_ZEROS:
                    self.reduction.contribute_zeros()
                case Action.FINALIZE:
                    self._finalize()
                case Action.ABANDON:
                    self.reduction.iteration = Iteration()
                case Action.LET_GO:
                    self.arrivals.disarm()

    def _output_reached(self, _: object) -> None:
        """Take the report that a backward has come to an output of forward."""
        self._begin_backward()
        self.reduction.iteration.is_reached = True

    def _begin_backward(self) -> None:
        if not self._was_handed_out_early:
            backwards.begin(self)

    @property
    def last_backward(self) -> int | None:
        """The number of the backward that ended the last iteration, while no other has begun."""
        return self._backward.number if self.state.phase is Phase.IDLE else None

    @property
    def is_reached(self) -> bool:
        """Whether the backward that runs now is known to have come to an output of this wrapper's."""
        return self._local.is_reached or backwards.takes_part(self)

    def begins_with_others(self, repeated: int | None) -> bool:
        """Whether the backward that runs now is the one that this wrapper awaits, though it has not come to an output.

        A forward under `no_sync` may await its own, which is none. After `torch.autograd.grad`, perhaps on this rank
        alone, the wrapper awaits one still.
        """
        awaits = self.state.phase in (Phase.ARMED, Phase.EARLY, Phase.PROBED)
        repeats = repeated is not None and self.last_backward == repeated
        if not (awaits or repeats) or self.reduction.iteration.context_id is not None:
            return False
        nodes = () if self.usage.follows_local or self._local.is_orphan else self._hooks.unshared(self.search.nodes)
        return any(brought_by_backward([*self.reduction.iteration.output_nodes, *nodes])) or self._anchor.is_coming()

    def send_what_waits(self) -> None:
        """Send the buckets that waited for other wrappers of the backward."""
        if self.state.phase is Phase.REDUCING:
            self._launch_full_buckets()

    def has_more_to_send(self) -> bool:
        """Whether buckets are left that every rank knows to leave within the backward; waits until it knows."""
        if self.state.phase not in (Phase.RUNNING, Phase.PROBED, Phase.REDUCING):
            return False
        self.reduction.read_forecast()
        return self.state.num_sure > 0

    def backward_begins(self) -> None:
        """Begin to reduce; with `find_unused_parameters`, tell ranks what this backward will bring."""
        self.before_backward()
        self.refuse_compiled_backward()
        if self.state.phase is Phase.BROKEN:
            self.check_finished()
        came = self._local.give_up()
        self._handle(Event.BACKWARD)
        for index in came:  # this backward runs through both: it averages everything
            self._take_reported_gradient(index)

    def _anchor_reached(self) -> None:
        """Take the report that a backward comes from outputs that no parameter took part in: it has begun for all."""
        if self.state.phase is Phase.RUNNING:
            self._handle(Event.GRADIENT)

    def _take_reported_gradient(self, index: int) -> None:
        """Take a gradient that its hook reported instead of counting it: a first, a repeated or an unawaited one."""
        due, phase = self.arrivals.due[index], self.state.phase
        if self._local.came is not None or self._local.is_anothers(index):
            self._local.take(index)
            return
        if due == 0:
            if phase in (Phase.IDLE, Phase.BROKEN) and not self._was_handed_out_early:
                self.absences.came_late(index)
                return
            if not self.absences.may_still_come(index):
                self.reduction.refuse(self.absences.one_too_many(index))
                return
            self.usage.unused.discard(index)
        if due <= 0:
            # Where ranks tell each other what they expect, they do when the backward reaches an output, and not before.
            if phase is Phase.ARMED and not (self.ranks_may_differ and self.reduction.iteration.is_announced):
                self._begin_backward()
            self.refuse_compiled_backward()
            self._handle(Event.GRADIENT)
        ready_ns = now_ns() - self.telemetry.current.backward_start
        self.planning.gradient_came(index)
        self.reduction.gradient_came(index)
        if self.parts.early_moves.takes[index] and abs(self.arrivals.due[index]) == 1 and not self.arrivals.learns:
            self.parts.early_moves.came(index)
        if self.arrivals.take(index, ready_ns):
            self._bucket_full(self.arrivals.bucket_of[index])

    def _bucket_full(self, bucket: int) -> None:
        self.reduction.fills(bucket)
        self._handle(Event.BUCKET_FULL, bucket=bucket)

    @without_grad
    def backward_ends(self) -> None:
        """Send all that has not been sent."""
        if self.state.phase is Phase.EARLY:
            self._handle(Event.BACKWARD)  # without having come to an output of forward
        self._handle(Event.BACKWARD_END)
        self._exchange_order(is_over=False)

    @without_grad
    def all_have_sent(self) -> None:
        """Wait for every bucket and hand out the averages, if they are due."""
        self._handle(Event.ALL_SENT)

    def all_have_handed_out(self) -> None:
        """Step the optimizers that parameters have of their own: of parameters that wrappers share once."""
        self.reduction.step_all()
        self._exchange_order(is_over=True)
        self.planning.await_order(self.peers, self.reduction.order)

    def _exchange_order(self, *, is_over: bool) -> None:
        if self.planning.has_rebuilt_buckets:
            return
        hook = self.reduction.comm_hook
        if is_over or hook is None or hook.group() is not None:  # another may communicate when its future is done
            with self.reduction.order.own():
                self.planning.exchange_order(self.group, self.peers, self.reduction.places)

    def backward_raised(self, number: int, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Take note that the backward with this number raised."""
        if number == self._backward.number:  # threads may drop one after the next has begun
            self._backward.is_compiled = False
            self._handle(Event.BACKWARD_RAISED)
            self._finish.raised_early = self.state.phase is Phase.PROBED and size_of(self.group) > 1
        self.peers.raised("backward", error, traceback, unfinished=self.state.phase is Phase.BROKEN)

    def compiled_backward_ended(self) -> None:
        """Take note that a backward is over which compiled autograd ran; what was due has been handed out."""
        self._backward.is_compiled = False
        if self.state.phase in (Phase.RUNNING, Phase.REDUCING):
            self._handle(Event.BACKWARD_END)

    def refuse_compiled_backward(self) -> None:
        """Raise `ReductionError` in a backward that compiled autograd runs, where the reducer must know of its end."""
        if in_compiled_backward() and not self.reduction.last_gradient_ends_it:
            raise self.parts.error(messages.compiled_backward(self.state.rank))

    @property
    def _was_handed_out_early(self) -> bool:
        return self._backward.is_compiled and self.state.phase is Phase.IDLE

    # -- actions ------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        # The same outputs once more: their gradients come from as many forwards as before.
        self.reduction.iteration = Iteration(self.reduction.iteration.num_forwards if self.state.is_repeated else 0)
        self.usage.unused.clear()
        self.telemetry.current.backward_start = NEVER
        self.arrivals.arm(static=self.reduction.options.static_graph)
        self.reduction.iteration_begins()
        self.reduction.user_hooks.iteration_begins(search=self._hooks.come_last() or self.arrivals.learns_order)

    def _watch_backward(self) -> None:
        self._backward = Backward(current_backward(), is_compiled=in_compiled_backward())
        tally = backwards.join(self, self._ends.next(), self.reduction.order.now())
        self.reduction.backward_begins(tally, is_compiled=self._backward.is_compiled)
        self.reduction.user_hooks.backward_begins(search=self._hooks.come_last())
        self.parts.early_moves.begin()
        if self.telemetry.current.backward_start == NEVER:
            self.telemetry.current.backward_start = now_ns()
            self.planning.backward_begins()

    def _expect(self) -> None:
        for bucket in self.absences.when_backward_begins(self._backward):
            self._bucket_full(bucket)

    @without_grad
    def _launch_full_buckets(self) -> None:
        if BucketPhase.FULL not in self.state.buckets:
            return
        self.reduction.read_forecast()
        num_launched = self.state.num_launched
        if backwards.may_send(self):
            self.reduction.launch_next()
            if num_launched < self.state.num_launched and not self.state.num_sure:
                backwards.has_sent(self)
        if self.state.phase is Phase.INCOMPLETE and self.state.num_late:
            self.reduction.agree_on_skipped()
            self.state.release()
            self.reduction.launch_next()
        if num_launched < self.state.num_launched == len(self.buckets):
            self._handle(Event.LAST_LAUNCHED)
            if self._backward.is_compiled and self.state.phase is Phase.REDUCED:
                backwards.end_alone(self)

    def _finalize(self) -> None:
        """Wait for every bucket and hand out the averages: gradients are final when this returns."""
        self.reduction.user_hooks.backward_ended(self.usage.unused, self.reduction.here())
        self.arrivals.end_iteration()
        if not (refused := self.reduction.a_rank_refuses()):
            self.reduction.hand_out_averages()
        self.usage.end_iteration()
        if self.telemetry.end() and is_verbose():
            milestone(messages.times(self.state.rank, self.telemetry.last_index, self.telemetry.averages_ns()))
        if refused:
            if self.usage.num_reading < size_of(self.group):
                self._handle(Event.REFUSED)  # the others go on with what was averaged, until they hear of it
            self.reduction.refuse_together()
        self.peers.step += 1
