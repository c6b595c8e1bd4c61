"""The reducer: turns what autograd reports into events of an iteration, and these into collectives.

A parameter's hook runs once per gradient and is the hot path: it counts down (`arrivals`). The first gradient of a
backward and a full bucket reach the reducer. It hands out the averages in a callback that autograd runs when the
backward is over, so that gradients are final when `backward()` returns.

Theory of operation. A DDP is not alone in its group: other wrappers and the user's own collectives share it, before,
within and after the backward. *Which collective comes next in a group is a function of what all its ranks know*, never
of when this rank's gradients arrived, of what this rank uses, of what it remembers, or of which wrappers it still
holds.

==========================  ======================================================  =================================
moment                      what every rank knows                                   what is sent then
==========================  ======================================================  =================================
forward                     all ranks run it: it is collective                      buffers
backward reaches an output  all ranks run this backward                             with `find_unused_parameters`,
                                                                                    which gradients are certain to
                                                                                    arrive (`expectations`), by all
                                                                                    wrappers whose backward it is
                                                                                    (`company`)
a bucket is full            without that option, and of a static graph: what each   the bucket, if all ranks await the
                            iteration brings, and whether in one order; with it:    same gradients of it, and all
                            the forecast, and whether it could have left in one     such before it have left, those of
                            order in the last iteration                             wrappers that were built later, too
                                                                                    (`company.may_send`)
the backward is over        nothing else will arrive                                the late buckets, in index order,
                                                                                    what was used, and once rank 0's
                                                                                    order, and whether all have it;
                                                                                    wrappers in the order of their
                                                                                    construction
==========================  ======================================================  =================================

A rank decides by itself when it waits, and what for: nothing is sent because a wait ended. The averages are handed out
when all wrappers of the backward have sent everything, so that what a bucket collects is what the backward brought.

Gradients that do not arrive are found when the backward is over. That alone makes the values right; the forecast only
lets buckets leave earlier. So opaque outputs, partial losses and functions that hide a backward of their own need no
further rules; of several forwards before one backward all buckets are late.

Where to look: `iteration` has the lifetimes and rules of an iteration; `expectations` what each option changes;
`reduction` what happens to a bucket; `company` what a reducer owes other collectives of its group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl.autograd.hooks import AutogradHooks, one_thread
from ddp_impl.autograd.marks import Anchor
from ddp_impl.base import messages
from ddp_impl.base.options import ReducerOptions
from ddp_impl.base.telemetry import NEVER, Observer, is_verbose, milestone, now_ns
from ddp_impl.buckets.arrivals import Arrivals
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.buckets.gradients import EarlyMoves
from ddp_impl.reducer.company import Construction, EngineRun, Tally, company, end_compiled_backward, has_sent, may_send
from ddp_impl.reducer.expectations import Captured, expectation_of
from ddp_impl.reducer.iteration import Action, Backward, Event, Iteration, Progress, Run
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.torch_internals.autograd import (
    WhenBackwardEnds,
    brought_by_backward,
    compiled_autograd,
    current_backward,
    current_distributed_context_id,
    in_backward,
    in_compiled_backward,
)
from ddp_impl.wire import collectives
from ddp_impl.wire.peers import Peers, in_lines

#: How long autograd's threads may take to drop a backward that raised: what they run at that moment.
_DROPPED_WITHIN_S = 10.0


class Reducer:
    """Averages the gradients of `members` over `group`; every rank must build it with equal members and options.

    `expectation`: of the present backward. `observers`: listen to backwards. `before_backward`: the wrapper's check
    between forward and backward. `in_use`: returns objects that outputs keep alive until their backward has run.
    `construction`, `may_share_backward` and `engine_run`: see `company.Participant`. `raised_early`: the last backward
    raised before its first gradient arrived.
    """

    def __init__(
        self,
        members: Sequence[ManagedParameter],
        group: dist.ProcessGroup,
        device: torch.device,
        options: ReducerOptions,
        peers: Peers | None = None,
        *,
        may_share_backward: bool = True,
        copied: Construction = (),
    ) -> None:
        """Plan one bucket per kind of gradient and listen to every parameter; see `Participant` and `construction`."""
        arrivals, self.early_moves = Arrivals(len(members)), EarlyMoves(len(members))
        has_threads = len({member.parameter.device for member in members}) > 1
        self._has_threads = has_threads
        self.hooks = AutogradHooks(members, arrivals, self, has_threads=has_threads)
        self.anchor = Anchor(device, self, has_threads=has_threads)
        self.reduction = Reduction(members, device, options, self.hooks, self.anchor, arrivals)
        self.reduction.reduce_over(group, Peers(group) if peers is None else peers)
        self.planning = BucketPlanning(self.reduction, self.early_moves)
        self.members, self.device, self.buckets = self.reduction.members, device, self.reduction.buckets
        self.arrivals, self.telemetry = arrivals, self.reduction.telemetry
        self.choose_options(options)
        self.choose_observers()
        self.construction, self.may_share_backward = company.construction(copied), may_share_backward
        self.engine_run: EngineRun | None = None
        self.before_backward: Callable[[], None] = _nothing
        self.in_use: Callable[[], object] = _nothing
        # Where autograd's threads drop a backward late: whether they have dropped the last one.
        self._run_is_over = threading.Event() if device.type != "cpu" or has_threads else None
        self.engine_run_is_over()
        self._backward = Backward()  # the last one that this wrapper took part in
        self._local: Backward | None = None  # one of forwards under `no_sync`, while it runs
        self.after_captured: list[Callable[[], None]] = []  # called once, when a captured backward ends
        self._local_is_reached = False  # one that has reached an output runs; kept where wrappers share parameters
        self._local_run = -2  # the number of the last backward that reached an output of a forward under `no_sync`
        self._num_triggers = 0  # how often the user has asked for a reduction by hand, after a local forward
        self.raised_early = self._wrapper_collected = False
        self.num_nodes_before_forward = 0  # in the graph; the wrapper notes it when a forward begins
        company.watch_for(self)

    def choose_options(self, options: ReducerOptions) -> None:
        """Expect of backwards what `options` say; before the first iteration, on every rank."""
        self.reduction.options = options
        self._chosen = self.expectation = expectation_of(self.reduction)
        self.ranks_may_differ = self.reduction.ranks_may_differ = self._chosen.ranks_may_differ

    @property
    def group(self) -> dist.ProcessGroup:
        """Over which gradients are averaged."""
        return self.reduction.group

    @property
    def peers(self) -> Peers:
        """The ranks of the group."""
        return self.reduction.peers

    # -- what the wrapper calls ---------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """Before a synchronised forward: check that the last reduction is complete, rebuild buckets if it is time.

        All ranks must call it. Raises `ReductionError` when gradients of the last iteration are missing.
        """
        self.check_finished()
        iteration = self.reduction.iteration
        if iteration.is_repeated and iteration.is_probed:
            # torch.autograd.grad, perhaps on this rank alone: others would rebuild buckets now without it.
            self.reduction.forget_iteration()
        self.telemetry.current.forward_start = now_ns()
        if self.reduction.learnt.order:
            self.rebuild_buckets()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """After a synchronised forward: expect gradients when a backward reaches `outputs`."""
        if not outputs:  # called by hand, as accelerate does to synchronise the backward of a forward under `no_sync`
            self._num_triggers += 1
        if self.reduction.iteration.enter(Event.FORWARD):
            self.open_iteration()
        iteration, in_use = self.reduction.iteration, self.in_use()
        iteration.is_repeated = False
        iteration.num_forwards += 1
        iteration.context_id = current_distributed_context_id()
        if self.may_share_backward:
            company.mark_shared(self)
            if company.has_an_order(self):
                iteration.note_outputs(outputs)
        captures = iteration.context_id is not None
        self.hooks.captures, self.early_moves.movable = captures, not captures
        if captures:
            self.hooks.listen_to_nodes(self.reduction.graph.nodes)
        iteration.is_announced |= self.hooks.on_backward(
            outputs, self.output_reached, in_use, since=self.num_nodes_before_forward, of="averages"
        )

    def forward_was_local(self, outputs: Iterable[Tensor]) -> None:
        """After a forward under `no_sync`: keep its gradients local, even if a synchronised one awaits its backward."""
        self.reduction.follows_local = True
        report = partial(self._local_output_reached, self._num_triggers)
        self.hooks.on_backward(outputs, report, since=self.num_nodes_before_forward, of="no_sync")

    def check_finished(self) -> None:
        """Raise `ReductionError`, naming parameters, when a backward has begun whose reduction is not complete.

        Also if another rank has reported such a backward, or a collective of the group has failed.
        """
        if self._run_is_over is not None and not in_backward():
            self._run_is_over.wait(_DROPPED_WITHIN_S)
        reduction, iteration, peers = self.reduction, self.reduction.iteration, self.reduction.peers
        if (peers.lost or peers.company.has_failed) and (lost := peers.why_lost()):
            raise reduction.error(lost)
        if iteration.progress is not Progress.IDLE and iteration.progress is not Progress.AWAITS:
            self._backward.has_named_missing = True
            raise self.expectation.unfinished()
        if reduction.learnt.unread and iteration.run is Run.NONE and reduction.was_refused_before():
            self._perform(iteration.enter(Event.REFUSED))
            raise reduction.error(messages.others_refused_before(reduction.rank) + peers.exchange(messages.FOLLOWS))
        if self.raised_early:
            # Another rank's backward may have raised after its first gradient, and this one would wait for it.
            reports = [report for report in peers.reports() or () if report.unfinished]
            self.raised_early = bool(reports)
            if reports:
                raise reduction.error(messages.aborted(reduction.rank) + in_lines(reports))

    def between_backwards(self, what: str) -> AbstractContextManager[None]:
        """Return the block in which ranks exchange `what` outside of backward; raises if the last has not sent all."""
        if self.reduction.iteration.progress is not Progress.HELD:
            self.check_finished()
        return self.peers.awaiting("forward", what)

    def wrapper_collected(self) -> None:
        """Average only backwards of outputs that still exist; drop the reference to the wrapper."""
        self._wrapper_collected, self.before_backward = True, _nothing

    def remove_hooks(self) -> None:
        """Stop listening to the parameters; gradients stay local from now on."""
        self.hooks.remove()
        self.anchor.let_go()

    def reset(self, group: dist.ProcessGroup) -> None:
        """Forget an unfinished iteration and what was learnt, and reduce over `group`; all its ranks must call it.

        Raises `ReductionError` where gradients of the last backward are missing and no error has said so.
        """
        if self.reduction.iteration.is_incomplete and not self._backward.has_named_missing:
            self.check_finished()
        self.raised_early = False
        self.reduction.reduce_over(group, Peers(group))
        # New storage, too: an abandoned collective may still be writing into the old one.
        self.planning.begin_to_learn()
        self.choose_observers()

    @torch.no_grad()
    def shadow_iteration(self) -> None:
        """Contribute zeros to an iteration of ranks that still have data; an optimizer may step its shard here, too."""
        self._perform(self.reduction.iteration.enter(Event.SHADOW))
        self.reduction.order.backward_begins(None)
        self.expectation.shadow_begins()
        self.reduction.send_zeros()
        self.expectation.exchange_usage()
        self.planning.exchange_order(is_over=False)
        self._perform(self.reduction.iteration.enter(Event.ALL_SENT))
        self.all_have_handed_out()

    @torch.no_grad()
    def finalize_by_hand(self) -> None:
        """Hand out the averages that a backward has left to the user; every rank must. Raises if there are none."""
        self.reduction.reveal_gradients()
        self._perform(self.reduction.iteration.enter(Event.BY_HAND))
        self.all_have_handed_out()

    def rebuild_buckets(self) -> bool:
        """Plan buckets anew by rank 0's order, if it is known; return whether it did. Collective with "auto" caps."""
        if not self.reduction.learnt.order or self.reduction.iteration.progress is not Progress.IDLE:
            return False
        if self.reduction.options.caps.measured:
            self.check_finished()
        self.planning.rebuild()
        self.choose_observers()
        return True

    # -- a backward begins --------------------------------------------------------------------------------------------

    def output_reached(self) -> None:
        """Take the report that a backward has reached an output of forward."""
        if not (self._backward.is_compiled and self._was_handed_out_early):
            self.begin_backward()
        self.reduction.iteration.is_reached = True

    def begin_backward(self) -> None:
        """Begin the backward that runs now, together with the other wrappers whose backward it is."""
        if self._has_threads:
            with one_thread:
                company.begin(self)
        elif self.may_share_backward:
            company.begin(self)
        else:
            self.backward_begins()

    @property
    def _was_handed_out_early(self) -> bool:
        return self._backward.is_compiled and self.reduction.iteration.progress is Progress.IDLE

    @property
    def last_backward(self) -> int | None:
        """The number of the backward that ended the last iteration, while no other has begun."""
        return self._backward.number if self.reduction.iteration.progress is Progress.IDLE else None

    @property
    def is_reached(self) -> bool:
        """Whether the backward that runs now is known to have reached an output of this wrapper's."""
        return self._local_is_reached or company.takes_part(self)

    def begins_with_others(self, repeated: int | None) -> bool:
        """Whether the wrapper awaits the backward that runs now, or its last one runs once more (`repeated`)."""
        iteration = self.reduction.iteration
        awaits = iteration.awaits_backward or iteration.run is Run.UNSEEN
        repeats = repeated is not None and self.last_backward == repeated
        if not (awaits or repeats) or iteration.context_id is not None:
            return False
        nodes: Sequence[Any] = ()
        if not (self.reduction.follows_local or self._wrapper_collected):
            nodes = self.hooks.unshared(self.reduction.graph.nodes)
        return any(brought_by_backward([*iteration.output_nodes, *nodes])) or self.anchor.will_be_reached()

    def backward_begins(self) -> None:
        """Begin to reduce; with `find_unused_parameters`, exchange which gradients are certain to arrive."""
        self.before_backward()
        if compiled_autograd.in_compiled_autograd_region:
            self.refuse_compiled_backward()
        if self.reduction.iteration.progress in (Progress.BROKEN, Progress.HELD):
            self.check_finished()
        local, self._local = self._local, None
        self._perform(self.reduction.iteration.enter(Event.BACKWARD))
        for index in local.arrived if local is not None else ():  # this backward runs through both
            self.take_gradient(index)

    def refuse_compiled_backward(self) -> None:
        """Raise `ReductionError` if compiled autograd runs a backward whose end the reducer must know."""
        allows = self._chosen.allows_absence
        if in_compiled_backward() and not self.reduction.may_finalize_in_backward(allows_absence=allows):
            raise self.reduction.error(messages.compiled_backward(self.reduction.rank))

    # -- gradients arrive ---------------------------------------------------------------------------------------------

    def anchor_reached(self) -> None:
        """Begin to collect: a backward has reached the anchor, from outputs that use no parameter of this rank."""
        iteration = self.reduction.iteration
        if iteration.progress is Progress.AWAITS and iteration.run is Run.RUNS:
            self._perform(iteration.enter(Event.GRADIENT))

    def take_gradient(self, index: int) -> None:
        """Take a gradient that the hook did not count itself: a first, a repeated, a late or an unexpected one."""
        reduction, arrivals = self.reduction, self.arrivals
        iteration, due = reduction.iteration, arrivals.due[index]
        waits = iteration.progress is Progress.AWAITS and iteration.run is not Run.RUNS
        if self._local is not None or (waits and self._belongs_to_other(index)):
            self._begin_local().arrived.append(index)
            return
        if due == 0:
            if iteration.progress is Progress.HELD:
                self.check_finished()
            if iteration.progress in (Progress.IDLE, Progress.BROKEN) and not self._was_handed_out_early:
                self._keep_local(index)
                return
            if not self.expectation.may_still_arrive(index):
                reduction.refuse(reduction.error(self.expectation.describe_unexpected(index)))
                return
            iteration.unused.discard(index)
        if due <= 0:
            # Where ranks exchange what they expect, they do when the backward reaches an output, and not before.
            is_announced = self.ranks_may_differ and iteration.is_announced
            if waits and iteration.run is Run.NONE and not is_announced:
                self.begin_backward()
            if iteration.run is not Run.RUNS:
                self.refuse_compiled_backward()
            self._perform(iteration.enter(Event.GRADIENT))
        learns = arrivals.learns
        if learns:
            iteration.arrived[index] = reduction.order.position_of_arrival()
            if not self.ranks_may_differ:
                reduction.order.count_arrival()
            for observer in self.observers:
                observer.gradient_arrived(index)
        if self.early_moves.takes[index] and abs(arrivals.due[index]) == 1 and not learns:
            self.early_moves.move(index)
        if arrivals.take(index, now_ns() - self.telemetry.current.backward_start):
            self.bucket_is_full(arrivals.bucket_of[index])

    def bucket_is_full(self, bucket: int) -> None:
        """Take note that all gradients of a bucket have arrived; send it if it is next."""
        iteration, order = self.reduction.iteration, self.reduction.order
        if bucket in iteration.full:
            raise iteration.illegal(f"bucket {bucket} is full again")
        iteration.full.add(bucket)
        expects_alike = order.tally is not None and not (self.ranks_may_differ or self.arrivals.learns)
        if expects_alike and all(self.reduction.learnt.in_order):
            order.count_arrival()
        if iteration.progress is Progress.COLLECTS and iteration.run is Run.RUNS:
            self.launch_full_buckets()

    def _keep_local(self, index: int) -> None:
        """Leave a gradient local that no iteration awaits; warn, once, unless it is of `no_sync`."""
        reduction, last = self.reduction, self.reduction.learnt.last_unused
        reduction.used_locally.add(index)
        if "local" in self.telemetry.warned or reduction.iteration.progress is not Progress.IDLE:
            return  # asked first: nothing that follows can be captured
        is_meant = reduction.follows_local or self._local_run == current_backward() or self._wrapper_collected
        is_anothers = index in self.hooks.shared()
        if reduction.num_ranks > 1 and not (is_meant or is_anothers):
            name, number = self.members[index].name, reduction.iteration.number
            warning = messages.gradient_of_unused if last and index in last else messages.went_past_the_wrapper
            self.telemetry.warn_once("local", warning(reduction.rank, name, number))

    # -- gradients that are not to be averaged ------------------------------------------------------------------------

    def _local_output_reached(self, num_triggers: int) -> None:
        """Take the report of an output of a forward under `no_sync`, unless a backward was triggered by hand since."""
        if num_triggers != self._num_triggers:
            return
        self._local_run = current_backward()
        iteration = self.reduction.iteration
        if iteration.is_incomplete or (iteration.launched and iteration.progress in (Progress.BROKEN, Progress.HELD)):
            self.check_finished()  # gradients may live in buckets that are in flight
        if iteration.awaits_backward:
            self._begin_local()
        if self.hooks.shared() and not self._local_is_reached and not in_compiled_backward():
            self._local_is_reached = True
            WhenBackwardEnds(self._local_output_is_over, self._local_output_is_over)

    def _local_output_is_over(self, *_: object) -> None:
        self._local_is_reached = False

    def _begin_local(self) -> Backward:
        """Return the local backward that runs now; it begins if none does."""
        if self._local is None:
            self.refuse_compiled_backward()
            self._local = Backward(current_backward())
            if self._run_is_over is not None:
                self._run_is_over.clear()
            WhenBackwardEnds(self._local_is_over, self._local_is_over)
        return self._local

    def _local_is_over(self, *_: object) -> None:
        if self._local is not None:
            self.reduction.used_locally.update(self._local.arrived)
        self._local = None
        self.engine_run_is_over()

    def _belongs_to_other(self, index: int) -> bool:
        """Whether a gradient is another wrapper's: the backward has reached an output of that, and none of this one."""
        return self._wrapper_collected or (index in self.hooks.shared() and company.backward_belongs_to_other(self))

    # -- buckets leave ------------------------------------------------------------------------------------------------

    def launch_full_buckets(self) -> None:
        """Send the full buckets that are next in order and not held back; late ones if the backward is over."""
        reduction, run, iteration = self.reduction, self.engine_run, self.reduction.iteration
        num_launched = len(iteration.launched)
        if num_launched == len(iteration.full):
            return
        if torch.is_grad_enabled():  # with create_graph=True
            with torch.no_grad():
                self.launch_full_buckets()
            return
        if self.ranks_may_differ:
            self.expectation.await_forecast()
        has_rivals = run is not None and run.has_rivals
        if not has_rivals or may_send(self):
            self._launch_next()
            if has_rivals and num_launched < len(iteration.launched) and not iteration.num_launchable_in_backward:
                has_sent(self)
        if iteration.num_late and iteration.is_incomplete:
            reduction.release_late()
            self._launch_next()
        if num_launched < len(iteration.launched) == len(self.buckets):
            self.telemetry.current.last_launch = now_ns()
            if actions := iteration.enter(Event.LAST_LAUNCHED):
                self._perform(actions)
            if self._backward.is_compiled and iteration.run is Run.RUNS:
                end_compiled_backward(self)

    def _launch_next(self) -> None:
        reduction = self.reduction
        for index in reduction.iteration.take_launchable():
            reduction.launch(self.buckets[index])
            if reduction.steps_optimizers:
                reduction.hand_out_all_but_the_last()

    def send_held_back(self) -> None:
        """Send the buckets that waited for other wrappers of the backward."""
        iteration = self.reduction.iteration
        if iteration.progress is Progress.COLLECTS and iteration.run is Run.RUNS:
            self.launch_full_buckets()

    def has_more_to_send(self) -> bool:
        """Whether buckets are left that may leave within the backward; waits for the forecast."""
        iteration = self.reduction.iteration
        if not ((iteration.run is Run.RUNS and iteration.progress is not Progress.SENT) or iteration.is_probed):
            return False
        if self.ranks_may_differ:
            self.expectation.await_forecast()
        return iteration.num_launchable_in_backward > 0

    # -- a backward ends ----------------------------------------------------------------------------------------------

    def backward_ends(self) -> None:
        """Send all that has not been sent."""
        iteration = self.reduction.iteration
        if iteration.run is Run.UNSEEN:
            self._perform(iteration.enter(Event.BACKWARD))  # without having reached an output of forward
        if actions := iteration.enter(Event.BACKWARD_END):
            self._perform(actions)
        if not self.reduction.learnt.has_rebuilt_buckets:
            self.planning.exchange_order(is_over=False)

    def all_have_sent(self) -> None:
        """Wait for every bucket and hand out the averages, if they are due; or leave that to the user."""
        if self.reduction.options.finalizes_by_hand:
            self._perform(self.reduction.iteration.enter(Event.LEFT_TO_USER))
        elif self.reduction.iteration.enter(Event.ALL_SENT):
            self.finalize()

    def all_have_handed_out(self) -> None:
        """Step the optimizers that parameters have of their own: of parameters that wrappers share once."""
        to_step = self.reduction.iteration.to_step
        while to_step:
            self.reduction.step(*to_step.pop())
        if not self.reduction.learnt.has_rebuilt_buckets:
            self.planning.exchange_order(is_over=True)
            self.planning.await_order()

    def engine_run_is_over(self) -> None:
        """Let the next forward go on, which may wait for the end of this backward."""
        if self._run_is_over is not None:
            self._run_is_over.set()

    def backward_raised(self, number: int, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Take note that the backward with this number raised."""
        iteration = self.reduction.iteration
        if number == self._backward.number:  # threads may drop one after the next has begun
            self._backward.is_compiled = False
            self._perform(iteration.enter(Event.BACKWARD_RAISED))
            self.raised_early = iteration.is_probed and self.reduction.num_ranks > 1
        self.peers.raised("backward", error, traceback, unfinished=iteration.progress is Progress.BROKEN)

    def compiled_backward_ended(self) -> None:
        """Note the end of a backward that compiled autograd ran; its averages are handed out already."""
        while self.after_captured:
            self.after_captured.pop()()
        self._backward.is_compiled = False
        iteration = self.reduction.iteration
        if iteration.run is Run.RUNS and iteration.progress is not Progress.SENT:
            self._perform(iteration.enter(Event.BACKWARD_END))

    # -- actions ------------------------------------------------------------------------------------------------------

    def _perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            _PERFORM[action](self)()

    def open_iteration(self) -> None:
        """Expect every gradient; of a backward that opens the iteration, from outputs of an earlier one."""
        reduction, last = self.reduction, self.reduction.iteration
        repeats = last.run is Run.RUNS
        iteration = Iteration(
            reduction.rank, last.number + 1, range(len(self.buckets)), last.progress, last.run, is_repeated=repeats
        )
        if repeats:  # the same outputs once more: their gradients come from as many forwards as before
            iteration.num_forwards = last.num_forwards
        if (promise := reduction.learnt.promise) is not None:
            iteration.used_anywhere = promise.used
        reduction.iteration = iteration
        self.telemetry.current.backward_start = NEVER
        self.arrivals.arm(static=self._chosen.is_static)
        if self.arrivals.learns:
            reduction.order.iteration_begins()
        self.expectation = self._chosen
        self._chosen.iteration_begins()
        # In the order of forwards, which wrappers that share a parameter keep.
        if self.hooks.run_after_user_hooks():
            self.find_user_hooks()

    def watch_backward(self) -> None:
        """Take part in the backward that runs now, and have autograd report its end."""
        reduction, run = self.reduction, company.join(self)
        self._backward = Backward(run.number, is_compiled=run.is_compiled)
        if self._run_is_over is not None:
            self._run_is_over.clear()
        is_captured = run.is_compiled and not self._chosen.allows_absence
        self.expectation = Captured(reduction) if is_captured else self._chosen
        learns = self.arrivals.learns
        if learns or run.tallies or reduction.order.tally is not None:
            self.counts_with(run.tally_of(self, begins=learns))
        if learns:
            self.expectation.learning_begins()
        if self.hooks.run_after_user_hooks() or not reduction.learnt.has_rebuilt_buckets:
            self.find_user_hooks()
        is_first = self.telemetry.current.backward_start == NEVER
        for observer in self.observers:
            observer.backward_begins(is_first=is_first)
        if is_first:
            self.telemetry.current.backward_start = now_ns()

    def find_user_hooks(self) -> None:
        """Look for hooks that users have put on parameters, which step an optimizer perhaps."""
        self.reduction.user_hooks.search()
        self.choose_observers()

    def choose_observers(self) -> None:
        """Choose the observers that have work, in order: the user's hooks, early moves, the device's clock."""
        hooks, moves, times = self.reduction.user_hooks, self.early_moves, self.planning.device_times
        learns = self.arrivals.num_to_learn_from
        candidates: list[tuple[Observer | None, Any]] = [(hooks, hooks.hooked), (moves, moves.buckets), (times, learns)]
        self.observers = tuple(observer for observer, work in candidates if observer is not None and work)

    def counts_with(self, tally: Tally | None) -> None:
        """Count the collectives of the backward that runs now in `tally`, as others of the group do."""
        self.reduction.order.backward_begins(tally)

    def resolve_unused(self) -> None:
        """Count as unused what did not arrive, as far as the expectation allows; send what is full now."""
        for full in self.expectation.resolve_unused():
            self.bucket_is_full(full)

    def announce(self) -> None:
        """Have the expectation exchange its forecast; count as unused the parameters that no rank will use."""
        absent = self.expectation.announce()
        if absent:
            self.reduction.iteration.unused.update(absent)
            for full in self.arrivals.exclude(absent):
                self.bucket_is_full(full)

    def finalize(self) -> None:
        """Wait for every bucket and hand out the averages: gradients are final when this returns."""
        reduction, iteration, learnt = self.reduction, self.reduction.iteration, self.reduction.learnt
        for observer in self.observers:
            observer.backward_ended(iteration.unused, reduction.prefix)
        self.arrivals.end_iteration()
        refused = iteration.usage is not None and self.expectation.a_rank_refuses()
        if not refused:
            reduction.finalize_buckets()
        if learnt.last_unused != iteration.unused:
            learnt.looks_static = learnt.looks_static and learnt.last_unused is None
            learnt.last_unused = set(iteration.unused)
        reduction.used_locally.clear()
        reduction.follows_local = False
        if self.telemetry.end() and is_verbose():
            milestone(messages.times(reduction.rank, self.telemetry.last_index, self.telemetry.averages_ns()))
        if refused:
            if not reduction.all_read:
                self._perform(iteration.enter(Event.REFUSED))  # the others see `was_refused_before`
            reduction.refuse_together()
        reduction.peers.step += 1

    # -- names of torch's reducer that other projects call (docs/drop_in.md) ------------------------------------------

    _rebuild_buckets, _check_reducer_finalized, _remove_autograd_hooks = rebuild_buckets, check_finished, remove_hooks

    def _set_forward_pass_work_handle(self, work: dist.Work, _: bool) -> None:
        """Have the first bucket wait for a join context's exchange in this forward."""
        self.reduction.join_agreements.append(partial(collectives.finished, work, "all_reduce"))

    def _delay_all_reduce(self) -> None:
        """Do nothing: torch flushes a static graph's first backward here; this reducer reduces it when it ends."""

    def _get_local_used_map(self) -> Tensor:
        """Return, per parameter, how many ranks used it in the last iteration; int32, 0 if ranks exchanged nothing."""
        return torch.tensor(self.reduction.num_users(), dtype=torch.int32, device="cpu")

    def _ddp_graph_static(self) -> bool:
        return self.reduction.learnt.looks_static


def _nothing() -> None:
    """Do nothing: keeps nobody alive."""


#: What the reducer calls for each action.
_PERFORM = {
    Action.ARM: attrgetter("open_iteration"),
    Action.WATCH: attrgetter("watch_backward"),
    Action.ANNOUNCE: attrgetter("announce"),
    Action.LAUNCH: attrgetter("launch_full_buckets"),
    Action.RESOLVE: attrgetter("resolve_unused"),
    Action.EXCHANGE_USAGE: attrgetter("expectation.exchange_usage"),
    Action.HIDE: attrgetter("reduction.hide_gradients"),
    Action.FINALIZE: attrgetter("finalize"),
    Action.DISARM: attrgetter("arrivals.disarm"),
}
