"""The reducer: turns what autograd reports into events, and the state machine's actions into collectives.

A parameter's hook runs once per gradient and is the hot path: it counts down (`arrivals`) and does nothing else. A full
bucket is an event of the state machine, which returns the actions to perform. The reducer hands out the averages in a
callback that autograd runs when the backward is over, so that gradients are final when `backward()` returns.

Theory of operation. A DDP is not alone in its group: other wrappers and the user's own collectives share it, before,
within and after the backward. *Which collective comes next in a group is a function of what all its ranks know*, never
of when this rank's gradients came, of what this rank uses, or of what it remembers.

==========================  ======================================================  =================================
moment                      what every rank knows                                   what is sent then
==========================  ======================================================  =================================
forward                     all ranks run it: it is collective                      buffers
backward reaches an output  all ranks run this backward                             with `find_unused_parameters`,
                                                                                    which gradients are sure to come
                                                                                    (`forecast`), by all wrappers
                                                                                    whose backward it is (`backwards`)
a bucket is full            without that option, and of a static graph: what each   the bucket, if all ranks await the
                            iteration brings; with it: the forecast                 same gradients of it, and all
                                                                                    such before it have left, those of
                                                                                    wrappers that were built later, too
                                                                                    (`backwards.may_send`)
the backward is over        nothing else will come                                  the late buckets, in index order,
                                                                                    and what was used; wrappers in the
                                                                                    order of their construction
all have handed out         this iteration is over on every rank that goes on       once rank 0's order, wrappers in
                                                                                    the order of their construction
==========================  ======================================================  =================================

A rank decides by itself when it waits, and what for: nothing is sent because a wait ended. The averages are handed out
when all wrappers of the backward have sent everything, so that what a bucket collects is what the backward brought.

Gradients that do not come are found when the backward is over. That alone makes the values right; the forecast only
lets buckets leave earlier. So opaque outputs, partial losses and functions that hide a backward of their own need no
further rules; of several forwards before one backward all buckets are late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl import backwards, collectives, messages
from ddp_impl.anchor import Anchor
from ddp_impl.arrivals import Arrivals
from ddp_impl.autograd_hooks import AutogradHooks
from ddp_impl.autograd_threads import BackwardEnds, lock_of_reducers, one_thread_at_a_time, without_grad
from ddp_impl.backwards import next_construction
from ddp_impl.bucket import ManagedParameter
from ddp_impl.bucket_planning import BucketPlanning
from ddp_impl.bucket_reduction import BucketReduction
from ddp_impl.early_moves import EarlyMoves
from ddp_impl.errors import ReductionError
from ddp_impl.groups import rank_in, size_of
from ddp_impl.iteration import Backward, Iteration
from ddp_impl.logs import is_verbose, milestone
from ddp_impl.options import ReducerOptions
from ddp_impl.peers import Peers, in_lines
from ddp_impl.reducer_state import Action, BucketPhase, Event, Phase, ReducerState
from ddp_impl.telemetry import NEVER, Moment, Telemetry
from ddp_impl.torch_internals.autograd import (
    brought_by_backward,
    current_backward,
    current_distributed_context_id,
    in_compiled_backward,
)
from ddp_impl.torch_internals.distributed import DebugLevel, get_debug_level
from ddp_impl.unused_parameters import GraphSearch


class Reducer:
    """Averages the gradients of `members` over `group`, iteration after iteration.

    Every rank must build it with equal members and options.
    """

    def __init__(
        self,
        members: Sequence[ManagedParameter],
        group: dist.ProcessGroup,
        device: torch.device,
        options: ReducerOptions,
        peers: Peers | None = None,
    ) -> None:
        """Plan one bucket per kind of gradient and register a hook on every parameter."""
        self.members = tuple(members)
        self.device = device
        self.telemetry = Telemetry()
        self.state = ReducerState(rank_in(group))
        self.arrivals = Arrivals(len(self.members))
        self.search = GraphSearch([member.parameter for member in self.members])
        self.reduction = BucketReduction(
            self.members, device, options, self.state, self.arrivals, self.telemetry, self.search, self.shared
        )
        self.reduction.reduce_over(group, Peers(group) if peers is None else peers)
        self.usage = self.reduction.usage
        self.buckets = self.reduction.buckets
        self.construction = next_construction()
        has_threads = len({member.parameter.device for member in self.members}) > 1
        self.lock = lock_of_reducers(has_threads)
        self._came_locally: list[int] | None = None  # in the backward of a forward under `no_sync`, if one runs
        self._backward = Backward()  # the last one that this wrapper took part in
        self._ends = BackwardEnds(drops_late=device.type != "cpu" or has_threads)
        self._num_triggers = 0
        self._raised_early = False  # the last backward, before its first gradient came; so other ranks' may have later
        self.before_backward: Callable[[], None] = lambda: None  # what the wrapper has to check when forward is over
        self._early_moves = EarlyMoves(len(self.members))
        self.planning = BucketPlanning(
            self.members, device, options, self.state, self.arrivals, self._early_moves, self.telemetry, self.buckets
        )
        self._hooks = AutogradHooks(
            self.members, self.arrivals, self._early_moves, self._bucket_full, self._take_reported_gradient
        )
        self._anchor = Anchor(device, self._anchor_reached)
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

    def tie_unused(self, output: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the `output` of a synchronised forward, which holds `tensors`; tied if no parameter took part in it.

        So a rank takes part in a backward in which others use parameters and it does not, where that is allowed. With
        every parameter frozen (a discriminator, while its generator trains) a forward is not part of the training.
        """
        is_alone = size_of(self.group) == 1
        if is_alone or not self._missing_is_unused() or self.search.uses_any(tensors):
            return output
        is_frozen = all(self.reduction.is_frozen(index) for index in range(len(self.members)))
        # torch.distributed.autograd captures gradients, and would show its users that of the anchor.
        if is_frozen or current_distributed_context_id() is not None:
            return output
        return self._anchor.tie(output)

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """After a synchronised forward: expect gradients when a backward comes to `outputs`."""
        outputs = list(outputs)
        if not outputs:  # called by hand, as accelerate does to synchronise the backward of a forward under `no_sync`
            self._num_triggers += 1
        tensors = [tensor for tensor in outputs if tensor.requires_grad]
        self._handle(Event.FORWARD)
        self.reduction.iteration.num_forwards += 1
        self.reduction.iteration.context_id = current_distributed_context_id()
        if self.usage.follows_local and backwards.have_an_order():
            self.reduction.iteration.outputs = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        self._hooks.captures = self.reduction.iteration.context_id is not None
        self._early_moves.movable = self.reduction.iteration.context_id is None
        if self._hooks.captures:
            self._hooks.listen_to_nodes(self.search.nodes)
        if self._hooks.on_backward(tensors, self._begin_backward):
            self.reduction.iteration.is_announced = True

    def forward_was_local(self, outputs: Iterable[Tensor]) -> None:
        """After a forward under `no_sync`: keep its gradients local, even if a synchronised one awaits its backward."""
        self.usage.follows_local = True
        tensors = [tensor for tensor in outputs if tensor.requires_grad]
        self._hooks.on_backward(tensors, partial(self._begin_local_backward, self._num_triggers))

    def check_finished(self) -> None:
        """Raise `ReductionError`, naming parameters, when a backward has begun and its reduction is not complete.

        Also when this rank's backward raised before its first gradient came and another's after: only that one cannot
        go on, and this one would wait for it.
        """
        self._ends.wait()
        if lost := self.peers.lost or self.peers.lost_by_another():
            raise self._error(lost)
        rank = self.state.rank
        if not self.state.is_unfinished:
            if self.state.phase in (Phase.IDLE, Phase.ARMED) and self.usage.refused_before():
                self._handle(Event.REFUSED)
                raise self._error(messages.others_refused_before(rank) + self.peers.exchange(messages.FOLLOWS))
            if self._raised_early:
                words = [word for word in self.peers.words() or () if word.unfinished]
                self._raised_early = bool(words)
                if words:
                    raise self._error(messages.aborted(rank) + in_lines(words))
            return
        if self.state.phase not in (Phase.INCOMPLETE, Phase.PROBED):
            raise self._error(messages.aborted(rank))
        self._backward.told_missing = True
        missing = [(index, self.members[index].name) for index in self.arrivals.missing]
        raise self._error(
            messages.unfinished(
                rank,
                missing,
                len(self.members),
                unused_allowed=self.options.find_unused_parameters,
                static=self.options.static_graph,
                verbose=get_debug_level() != DebugLevel.OFF,
            )
            + self.peers.exchange(messages.lacks([name for _, name in missing], self.peers.step))
        )

    @contextmanager
    def between_backwards(self, what: str) -> Iterator[None]:
        """Let the block wait for `what` of other ranks; all communication outside of backward goes here.

        Raises `ReductionError` where the last reduction is not complete: ranks that wait for it would meet the block's
        collectives instead.
        """
        self.check_finished()
        with self.peers.awaiting("forward", what):
            yield

    def all_capture(self, mine: bool) -> bool:
        """Return whether every rank captures the module as one graph, as this one does if `mine`.

        All ranks must call it in one forward.
        """
        answer = torch.tensor(int(mine), device="cpu").to(self.device)
        with self.peers.awaiting("forward", "whether the other ranks capture the module as one graph"):
            collectives.all_reduce_now(answer, self.group, dist.ReduceOp.MIN)
        return bool(answer)

    def remove_hooks(self) -> None:
        """Stop listening to the parameters; gradients stay local from now on."""
        self._hooks.remove()
        self._anchor.let_go()
        self.reduction.iteration.outputs = ()  # their hooks hold this reducer: a circle that no garbage collection sees

    @property
    def is_deaf(self) -> bool:
        """Whether it has stopped listening to the parameters."""
        return self._hooks.are_removed

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
        self._raised_early = False
        self.state.rank = rank_in(group)
        self.reduction.reduce_over(group, Peers(group))
        # New storage, too: an abandoned collective may still be writing into the old one.
        self.planning.begin_to_learn(self.options)

    @without_grad
    def shadow_iteration(self) -> None:
        """Take part in an iteration of ranks that still have data, contributing zeros.

        The reducer hands out averages on this rank as well: an optimizer that is sharded over ranks
        (`ZeroRedundancyOptimizer`) steps its shard here too.
        """
        self._handle(Event.SHADOW)
        self.all_have_sent()
        self.all_have_handed_out()

    def shared(self) -> Collection[int]:
        """Return the indices of the parameters whose gradients another wrapper averages, too."""
        return self._hooks.shared()

    @property
    def group(self) -> dist.ProcessGroup:
        """Over which gradients are averaged."""
        return self.reduction.group

    @property
    def peers(self) -> Peers:
        """The ranks of the group."""
        return self.reduction.peers

    @property
    def options(self) -> ReducerOptions:
        """What the user asked for."""
        return self.reduction.options

    @options.setter
    def options(self, options: ReducerOptions) -> None:
        self.reduction.options = options

    @property
    def ranks_may_differ(self) -> bool:
        """Whether ranks tell each other what they use, before an iteration's gradients come and after."""
        return self.reduction.ranks_may_differ

    def _error(self, message: str) -> ReductionError:
        return self.telemetry.logged(ReductionError(message))

    def rebuild_buckets(self) -> None:
        """Plan buckets anew from the order in which gradients came on rank 0; once, when it is known.

        Collective with `bucket_cap_mb="auto"`. Raises `ReductionError` if rank 0 has sent that of another wrapper.
        """
        self.planning.rebuild(self.group, self.peers, self.between_backwards)

    # torch's names, which other projects use: docs/private_names.md

    def _rebuild_buckets(self) -> bool:
        before = self.planning.has_rebuilt_buckets
        self.rebuild_buckets()
        return self.planning.has_rebuilt_buckets and not before

    _check_reducer_finalized = check_finished
    _remove_autograd_hooks = remove_hooks

    def _set_forward_pass_work_handle(self, work: dist.Work, _: bool) -> None:
        """Wait for what a join context was told of this forward."""
        collectives.finished(work, "all_reduce")

    def _delay_all_reduce(self) -> None:
        """Do nothing: what torch flushes by hand after a static graph's first backward is reduced when it ends."""

    def _get_local_used_map(self) -> Tensor:
        """Return, per parameter, how many ranks used it in the last iteration; int32, 0 if ranks exchanged nothing."""
        return torch.tensor(self.usage.num_users(), dtype=torch.int32, device="cpu")

    def _ddp_graph_static(self) -> bool:
        return self.usage.looks_static

    # -- events -------------------------------------------------------------------------------------------------------

    @one_thread_at_a_time
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
                    self._settle_missing()
                case Action.CONTRIBUTE_ZEROS:
                    self.reduction.contribute_zeros()
                case Action.FINALIZE:
                    self._finalize()
                case Action.ABANDON:
                    self.reduction.iteration = Iteration()
                case Action.LET_GO:
                    self.arrivals.disarm()

    def _begin_backward(self) -> None:
        """Take the report that a backward has come to an output of forward."""
        if not self._was_handed_out_early:
            backwards.begin(self)

    @property
    def last_backward(self) -> int | None:
        """The number of the backward that ended the last iteration, while no other has begun."""
        return self._backward.number if self.state.phase is Phase.IDLE else None

    def begins_with_others(self, repeated: int | None) -> bool:
        """Whether the backward that runs now is the one that this wrapper awaits, though it has not come to an output.

        A forward under `no_sync` may await its own, which is none. After `torch.autograd.grad`, perhaps on this rank
        alone, the wrapper awaits one still.
        """
        awaits = self.state.phase in (Phase.ARMED, Phase.EARLY, Phase.PROBED)
        repeats = repeated is not None and self.last_backward == repeated
        if not (awaits or repeats) or self.reduction.iteration.context_id is not None:
            return False
        nodes = self.reduction.iteration.outputs if self.usage.follows_local else self.search.nodes
        return any(brought_by_backward(nodes)) or self._anchor.is_coming()

    @one_thread_at_a_time
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
        self._refuse_compiled_backward()
        if self.state.phase is Phase.BROKEN:
            self.check_finished()
        came, self._came_locally = self._came_locally or [], None
        self._handle(Event.BACKWARD)
        for index in came:  # this backward runs through both: it averages everything
            self._take_reported_gradient(index)

    def _begin_local_backward(self, num_triggers: int) -> None:
        """Take the report that a backward has come to an output of a forward under `no_sync`.

        While nothing is expected, gradients are local anyway; once a synchronised backward runs, this is a part of it.
        So is one that was triggered by hand after its forward, when there were `num_triggers`.
        """
        if num_triggers != self._num_triggers:
            return
        if self.state.phase is Phase.INCOMPLETE or (self.state.num_launched and self.state.phase is Phase.BROKEN):
            self.check_finished()  # gradients may live in buckets that are in flight
        if self._came_locally is None and self.state.phase in (Phase.ARMED, Phase.PROBED):
            self._refuse_compiled_backward()
            self._came_locally = []
            self._ends.call(self._local_backward_ended, lambda *_: self._local_backward_ended())

    def _local_backward_ended(self) -> None:
        self.usage.used_locally.update(self._came_locally or ())
        self._came_locally = None

    def _anchor_reached(self) -> None:
        """Take the report that a backward comes from outputs that no parameter took part in: it has begun for all."""
        if self.state.phase is Phase.RUNNING:
            self._handle(Event.GRADIENT)

    @one_thread_at_a_time
    def _take_reported_gradient(self, index: int) -> None:
        """Take a gradient that its hook reported instead of counting it: a first, a repeated or an unawaited one."""
        if self._came_locally is not None:
            self._came_locally.append(index)
            return
        due, phase = self.arrivals.due[index], self.state.phase
        if due == 0:
            if phase in (Phase.IDLE, Phase.BROKEN) and not self._was_handed_out_early:
                self.usage.used_locally.add(index)
                return
            if not self._is_welcome_late(index):
                self.reduction.refuse(self._unexpected(index))
                return
            self.usage.unused.discard(index)
        if due <= 0:
            if phase is Phase.ARMED and not self._waits_for_outputs:
                self._begin_backward()
            self._refuse_compiled_backward()
            self._handle(Event.GRADIENT)
        ready_ns = time.perf_counter_ns() - self.telemetry.current.backward_start.steady_ns
        self.planning.gradient_came(index)
        if self._early_moves.takes[index] and abs(self.arrivals.due[index]) == 1 and not self.arrivals.learns:
            self._early_moves.came(index)
        if self.arrivals.take(index, ready_ns):
            self._bucket_full(self.arrivals.bucket_of[index])

    def _bucket_full(self, bucket: int) -> None:
        self._handle(Event.BUCKET_FULL, bucket=bucket)

    @without_grad
    def backward_ends(self) -> None:
        """Send all that has not been sent."""
        if self.state.phase is Phase.EARLY:
            self._handle(Event.BACKWARD)  # without having come to an output of forward
        self._handle(Event.BACKWARD_END)

    @without_grad
    def all_have_sent(self) -> None:
        """Wait for every bucket and hand out the averages, if they are due."""
        self._handle(Event.ALL_SENT)

    def all_have_handed_out(self) -> None:
        """Step the optimizers that parameters have of their own: of parameters that wrappers share once."""
        while self.reduction.iteration.to_step:
            self.reduction.step(self.reduction.iteration.to_step.pop())
        # Behind what comm hooks communicate when a future of theirs is done.
        self.planning.exchange_order(self.group, self.peers)

    def backward_raised(self, number: int, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Take note that the backward with this number raised."""
        is_latest = number == self._backward.number  # threads may drop one after the next has begun
        if is_latest:
            self._backward.is_compiled = False
            self._handle(Event.BACKWARD_RAISED)
            self._raised_early = self.state.phase is Phase.PROBED and size_of(self.group) > 1
        self.peers.raised("backward", error, traceback, unfinished=self.state.phase is Phase.BROKEN)

    def compiled_backward_ended(self) -> None:
        """Take note that a backward is over which compiled autograd ran; what was due has been handed out."""
        self._backward.is_compiled = False
        if self.state.phase in (Phase.RUNNING, Phase.REDUCING):
            self._handle(Event.BACKWARD_END)

    def _refuse_compiled_backward(self) -> None:
        if in_compiled_backward() and not self._last_gradient_ends_it:
            raise self._error(messages.compiled_backward(self.state.rank))

    @property
    def _last_gradient_ends_it(self) -> bool:
        """Whether all can be handed out when the last gradient comes, though the backward goes on; alike on all ranks.

        Not where gradients may be missing or another wrapper awaits some of them, too; nor where parameters may step
        then, as a comm hook can have them do: what compiled autograd has captured may read them later.
        """
        if torch.compiler.is_dynamo_compiling():  # with fullgraph=True, which leaves no hook as it is
            return False
        options = self.options
        waits = options.find_unused_parameters or options.static_graph or options.delayed or self._hooks.shared()
        return not (waits or self.reduction.steps_optimizers or self.reduction.comm_hook is not None)

    @without_grad
    def _hand_out_early(self) -> None:
        """Hand out the averages within a backward that compiled autograd runs: raise here, or nobody hears of it."""
        self.backward_ends()
        self.all_have_sent()
        self.all_have_handed_out()

    @property
    def _was_handed_out_early(self) -> bool:
        return self._backward.is_compiled and self.state.phase is Phase.IDLE

    @property
    def _waits_for_outputs(self) -> bool:
        """Whether ranks tell each other what they expect when the backward reaches an output, and not before."""
        return self.ranks_may_differ and self.reduction.iteration.is_announced

    def _is_welcome_late(self, index: int) -> bool:
        """Whether a parameter that the reducer took for unused can still have its gradient in its bucket."""
        bucket = self.arrivals.bucket_of[index]
        return (
            index in self.usage.unused
            and not self.options.static_graph
            and bucket not in self.reduction.iteration.skipped
            and self.state.buckets[bucket] is not BucketPhase.LAUNCHED
        )

    def _unexpected(self, index: int) -> ReductionError:
        rank, name, static = self.state.rank, self.members[index].name, self.options.static_graph
        if index in self.usage.unused:
            return self._error(messages.used_after_all(rank, name, static=static))
        return self._error(messages.ready_twice(rank, name, self.state.num_iterations, static=static))

    # -- actions ------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        # The same outputs once more: their gradients come from as many forwards as before.
        self.reduction.iteration = Iteration(self.reduction.iteration.num_forwards if self.state.is_repeated else 0)
        self.usage.unused.clear()
        self.telemetry.current.backward_start = NEVER
        self.arrivals.arm(static=self.options.static_graph)
        if self.usage.promise is not None:
            self.reduction.hold_back(self.usage.promise.alike)
        self.reduction.user_hooks.iteration_begins(search=self._hooks.come_last() or self.arrivals.learns_order)

    def _watch_backward(self) -> None:
        self._backward = Backward(current_backward(), is_compiled=in_compiled_backward())
        backwards.take_part(self, self._ends.next())
        self.reduction.user_hooks.backward_begins(search=self._hooks.come_last())
        self._early_moves.begin()
        if self.telemetry.current.backward_start is NEVER:
            self.telemetry.current.backward_start = Moment.now()
            self.planning.backward_begins()

    def _expect(self) -> None:
        """Take as unused what all ranks know that it is; tell them what this backward is sure to bring, if they ask."""
        absent: list[int] = []
        if self.options.static_graph:
            absent = self.arrivals.never_used
        elif self._backward.is_compiled:  # at its end it would be too late to find them
            absent = [i for i, comes in enumerate(self.search.coming()) if not comes and self.reduction.is_frozen(i)]
        elif not self.options.find_unused_parameters:
            absent = [i for i in self.usage.last_unused or () if self.reduction.is_frozen(i)]
        elif not self.reduction.iteration.has_forecast:
            coming = self.search.coming()
            if self._hooks.are_removed or not (any(coming) or self._anchor.is_coming()):
                return  # torch.autograd.grad, perhaps on this rank alone
            self.reduction.tell_others(coming)
        self.usage.unused.update(absent)
        for bucket in self.arrivals.exclude(absent):
            self._bucket_full(bucket)

    def _missing_is_unused(self) -> bool:
        return self.options.find_unused_parameters or self.options.static_graph

    def _settle_missing(self) -> None:
        """At the end of a backward, take as unused what has not come, or leave it to another backward."""
        if not self._missing_is_unused():
            frozen = [index for index in self.arrivals.missing if self.reduction.is_frozen(index)]
            self.usage.unused.update(frozen)
            for bucket in self.arrivals.exclude(frozen):
                self._bucket_full(bucket)
            self.arrivals.report_next()
            return
        self.usage.unused.update(self.arrivals.conclude())
        for index in [index for index, phase in enumerate(self.state.buckets) if phase is BucketPhase.FILLING]:
            self._bucket_full(index)

    @without_grad
    def _launch_full_buckets(self) -> None:
        if BucketPhase.FULL not in self.state.buckets:
            return
        self.reduction.read_forecast()
        num_launched = self.state.num_launched
        if backwards.may_send(self):
            self._launch_next()
            if num_launched < self.state.num_launched and not self.state.num_sure:
                backwards.has_sent(self)
        if self.state.phase is Phase.INCOMPLETE and self.state.num_late:
            self.reduction.agree_on_skipped()
            self.state.release()
            self._launch_next()
        if num_launched < self.state.num_launched == len(self.buckets):
            self.telemetry.current.last_launch = Moment.now()
            self._handle(Event.LAST_LAUNCHED)
            if self._backward.is_compiled and self.state.phase is Phase.REDUCED:
                self._hand_out_early()

    def _launch_next(self) -> None:
        for index in self.state.take_launchable():
            self.reduction.launch(self.buckets[index])
            if self.reduction.steps_optimizers:
                self.reduction.hand_out_all_but_the_last()

    def _finalize(self) -> None:
        """Wait for every bucket and hand out the averages: gradients are final when this returns."""
        self.reduction.user_hooks.backward_ended(self.usage.unused, self.reduction.here())
        self.arrivals.end_iteration()
        refused = self.reduction.a_rank_refuses()
        if not refused:
            self.reduction.hand_out_averages()
        self.usage.end_iteration()
        self.reduction.iteration.outputs = ()
        if self.telemetry.end() and is_verbose():
            milestone(messages.times(self.state.rank, self.telemetry.last_index, self.telemetry.averages_ns()))
        if refused:
            if self.usage.num_reading < size_of(self.group):
                self._handle(Event.REFUSED)  # the others go on with what was averaged, until they hear of it
            self.reduction.refuse_together()
        self.peers.step += 1
