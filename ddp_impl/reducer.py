"""The reducer: turns autograd's hooks into events, and the state machine's actions into collectives.

A parameter's hook runs once per gradient and is the hot path: it counts down in its bucket and does nothing else. A
full bucket enters the state machine, which says which buckets may be launched. The averages are handed out by a
callback that autograd runs when the backward is over, so that gradients are final when `backward()` returns.

Gradients that do not come are found in two ways. Before the backward, a walk from the outputs of all forwards since
the last reduction (`unused_parameters`) tells what cannot be reached: those are ready at once and hold up nothing.
After the backward, whatever still has not come was left out of the loss. The first way is only an optimisation of the
second, so several forwards before one backward, opaque outputs and partial losses need no rules of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.autograd import Variable
from torch.futures import Future

from ddp_impl import collectives, messages
from ddp_impl.auto_buckets import NUM_PROFILED, PROBE_BYTES, AllReduceCost, choose_caps
from ddp_impl.bucket import Bucket, GradBucket, ManagedParameter
from ddp_impl.bucket_plan import BucketPlan, plan_for_order, plan_for_unknown_order
from ddp_impl.comm_hooks.registration import BoundHook, call_hook, tensor_in
from ddp_impl.compile.active_compiler import in_compiled_backward
from ddp_impl.errors import ReductionError
from ddp_impl.gradient_homes import (
    GRAD_ATTRIBUTE,
    LOCAL_SHARD,
    GradientHome,
    autograd_context,
    current_context_id,
)
from ddp_impl.gradients import collect, collect_sparse, empty_sparse, hand_out
from ddp_impl.optimizer_in_backward import step_parameters
from ddp_impl.options import BucketCaps, ReducerOptions
from ddp_impl.parameter_usage import ParameterUsage
from ddp_impl.reducer_state import Action, BucketPhase, Event, Phase, ReducerState
from ddp_impl.telemetry import Telemetry
from ddp_impl.unused_parameters import GraphWalk

#: Marks a gradient whose arrival is not counted down but noted: the first iteration learns from it.
_LEARNING = -1


class Reducer:
    """Averages the gradients of `members` over `group`, iteration after iteration.

    Every rank must build it with equal members and options. `divisor` is what sums are divided by: the world size,
    unless join says otherwise.
    """

    has_rebuilt_buckets: bool
    order: list[int]  # in which gradients became ready, in the iteration that was learnt from last
    _ready_ns: list[int]  # how long after the beginning of the backward
    _learnt: list[int] | None  # static graph: how often each gradient arrives per iteration

    def __init__(
        self,
        members: Sequence[ManagedParameter],
        group: dist.ProcessGroup,
        device: torch.device,
        options: ReducerOptions,
    ) -> None:
        """Plan one bucket per kind of gradient and register a hook on every parameter."""
        self.members = tuple(members)
        self.options = options
        self.device = device
        self.group = group
        self.divisor = dist.get_world_size(group)
        self.comm_hook: BoundHook | None = None
        self.steps_optimizers = False
        self.post_backward_futures: list[Future[Any]] = []
        self.telemetry = Telemetry()
        self.usage = ParameterUsage(len(self.members))
        self.state = ReducerState(dist.get_rank(group))
        self.specs = [member.spec(delayed=member.name in options.delayed) for member in self.members]
        self._walk = GraphWalk([member.parameter for member in self.members])
        self.num_buckets_reduced = 0
        self._reachable: set[int] | None = set()  # from all forwards since the last reduction; None: unknown
        self._marked_unused = False
        self._callback_queued = False
        self._in_flight: dict[int, tuple[Tensor, Any]] = {}
        self._skipped: set[int] = set()
        self._context_id: int | None = None  # of the torch.distributed.autograd context that forward ran in
        self._node_handles: list[Any] = []
        self._seen: set[int] = set()  # gradients that arrived while learning
        self._counts: list[int] = []
        # One countdown per parameter: gradients it still has to bring in this iteration. 0: none is expected.
        self._waiting: list[int] = [0] * len(self.members)
        self._expected: list[int] = list(self._waiting)
        self.buckets: list[Bucket] = []
        self._bucket_of: list[Bucket] = []
        self._begin_to_learn()
        self._hook_handles = [
            member.parameter.register_post_accumulate_grad_hook(self._make_hook(member.index))
            for member in self.members
        ]

    # -- what the wrapper calls ---------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """Before a synchronised forward: check that the last reduction is complete, rebuild buckets if it is time.

        All ranks must call it. Raises `ReductionError` when gradients of the last iteration are missing.
        """
        self.check_finished()
        self.telemetry.begin()
        self.rebuild_buckets()

    def rebuild_buckets(self) -> None:
        """Plan buckets anew from the order in which rank 0 saw gradients become ready; once, when it is known.

        All ranks must call it between iterations.
        """
        if self._learns_order or self.has_rebuilt_buckets or self.state.phase is not Phase.IDLE:
            return
        order = collectives.broadcast_integers(self.order, len(self.members), self.group, self.device)
        if self.options.caps.measured:
            self.caps = self._choose_caps()
        self._adopt(plan_for_order(self.specs, order, self.caps))
        self.has_rebuilt_buckets = True

    _rebuild_buckets = rebuild_buckets  # torch's name; lightning calls it

    def _choose_caps(self) -> BucketCaps:
        """Return the caps that rank 0's measurements recommend. All ranks must call it."""
        cost = AllReduceCost.fit(collectives.time_all_reduces(PROBE_BYTES, self.group, self.device))
        ready_s = {index: ns / 1e9 for index, ns in zip(self.order, self._ready_ns, strict=True)}
        choice = choose_caps(self.specs, ready_s, cost, self.options.caps)
        chosen = [choice.caps.first_bytes, choice.caps.cap_bytes]
        first_bytes, cap_bytes = collectives.broadcast_integers(chosen, 2, self.group, self.device)
        return BucketCaps(first_bytes, cap_bytes, measured=True)

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """After a synchronised forward: expect gradients of everything that `outputs` can reach."""
        tensors = [tensor for tensor in outputs if tensor.requires_grad]
        reachable: set[int] | None = None
        if self.options.find_unused_parameters:
            with torch.autograd.profiler.record_function("ddp_impl.search_unused_parameters"):
                if tensors and self._walk_pays:
                    reachable = self._walk.reachable(tensors)
        actions = self.state.handle(Event.FORWARD)
        self._callback_queued = False
        self._context_id = current_context_id()
        if self._context_id is not None:
            self._listen_to_nodes()
        if Action.ARM in actions:
            self._arm(reachable)
        elif self._reachable is not None:
            self._reachable = None if reachable is None else self._reachable | reachable
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._make_prehook(reachable))

    def check_finished(self) -> None:
        """Raise `ReductionError`, naming parameters, when a backward has begun and its reduction is not complete."""
        if self.state.phase is Phase.ARMED and self._waiting != self._expected:
            self.state.handle(Event.GRADIENT)
        if self.state.phase not in (Phase.REDUCING, Phase.REDUCED):
            return
        rank = self.state.rank
        if self._callback_queued:
            raise self._error(messages.aborted(rank))
        missing = [
            (member.index, member.name)
            for member in self.members
            if self._waiting[member.index] != 0 and member.index not in self._seen
        ]
        raise self._error(
            messages.unfinished(
                rank,
                missing,
                len(self.members),
                unused_allowed=self.options.find_unused_parameters,
                static=self.options.static_graph,
                verbose=get_debug_level() != DebugLevel.OFF,
            )
        )

    def remove_hooks(self) -> None:
        """Stop listening to the parameters; gradients stay local from now on."""
        for handle in self._hook_handles + self._node_handles:
            handle.remove()
        self._hook_handles, self._node_handles = [], []

    def reset(self, group: dist.ProcessGroup) -> None:
        """Forget an unfinished iteration and reduce over `group` from now on; all its ranks must call it.

        What was learnt is forgotten too, buckets included: ranks that are new in the group know nothing of it.
        Gradients that wait for their first reduction go on waiting.
        """
        if Action.ABANDON in self.state.handle(Event.RESET):
            self._in_flight.clear()
        self._disarm()
        self.group = group
        self.divisor = dist.get_world_size(group)
        self.state.rank = dist.get_rank(group)
        self.usage.forget_agreements()
        # New storage, too: an abandoned collective may still be writing into the old one.
        self._begin_to_learn()

    def _delay_all_reduce(self) -> None:
        """Do nothing: what torch flushes by hand after a static graph's first backward is reduced when it ends."""

    @torch.no_grad()
    def shadow_iteration(self) -> None:
        """Take part in an iteration of ranks that still have data, contributing zeros.

        The averages are handed out here as well: an optimizer that is sharded over ranks
        (`ZeroRedundancyOptimizer`) steps its shard on this rank too.
        """
        self._arm(set())
        self.usage.used_locally.clear()
        self.usage.unused = set(range(len(self.members)))
        self._agree_on_skipped(range(len(self.members)))
        for bucket in self.buckets:
            if bucket.index not in self._skipped:
                nothing = empty_sparse(bucket.parameters[0]) if bucket.sparse else bucket.flat.zero_()
                bucket.homeless[:] = range(len(bucket.members))
                self._start(bucket, nothing)
        self._ask_usage()
        self._finalize()

    # -- hooks: autograd tells ----------------------------------------------------------------------------------------

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        waiting, reducer = self._waiting, self

        def gradient_ready(_: Tensor) -> None:
            if waiting[index] == 1:
                waiting[index] = 0
                bucket = reducer._bucket_of[index]
                bucket.pending -= 1
                if not bucket.pending:
                    reducer._bucket_full(bucket)
            else:
                reducer._gradient_out_of_the_ordinary(index)

        return gradient_ready

    def _listen_to_nodes(self) -> None:
        # torch.distributed.autograd captures gradients at the accumulation nodes and leaves the tensors' hooks alone.
        if self._node_handles:
            return
        for index, node in enumerate(self._walk.nodes):
            self._node_handles.append(node.register_hook(self._make_node_hook(index)))

    def _make_node_hook(self, index: int) -> Callable[[Any, Any], None]:
        gradient_ready = self._make_hook(index)

        def captured(_: Any, __: Any) -> None:
            if self._context_id is not None and self._waiting[index]:
                gradient_ready(self.members[index].parameter)

        return captured

    def _make_prehook(self, reachable: set[int] | None) -> Callable[[Any], None]:
        def backward_begins(_: Any) -> None:
            self._begin_backward(reachable)

        return backward_begins

    def _begin_backward(self, reachable: set[int] | None) -> None:
        if self.state.phase is Phase.IDLE and self._waiting != self._expected:
            self._disarm()
        if Action.ARM in self.state.handle(Event.BACKWARD):
            self._arm(reachable)
        if not self._callback_queued:
            self._call_back_when_over()
        if not self._marked_unused:
            self._marked_unused = True
            self.telemetry.current.backward_start_ns = time.time_ns()
            self._mark_unused()

    def _call_back_when_over(self) -> None:
        if in_compiled_backward():  # which drops such callbacks
            raise self._error(messages.compiled_backward(self.state.rank))
        self._callback_queued = True
        Variable._execution_engine.queue_callback(self._backward_ended)

    def _gradient_out_of_the_ordinary(self, index: int) -> None:
        """Take a gradient that is learnt from, comes more than once by plan, is local, or should not be there."""
        left = self._waiting[index]
        bucket = self._bucket_of[index]
        if left == _LEARNING:
            if not self._callback_queued:
                self._begin_backward(None)
            if self._learnt is not None or not self.options.static_graph:
                self._waiting[index] = 0
                bucket.pending -= 1
            else:
                self._counts[index] += 1
            if index not in self._seen:
                if not self._seen:
                    self.order, self._ready_ns = [], []
                self._seen.add(index)
                self.order.append(index)
                self._ready_ns.append(time.time_ns() - self.telemetry.current.backward_start_ns)
            if not bucket.pending:
                self._bucket_full(bucket)
        elif left > 1:
            self._waiting[index] = left - 1
        elif self.state.phase is Phase.IDLE:
            self.usage.used_locally.add(index)
        else:
            raise self._unexpected(index)

    def _unexpected(self, index: int) -> ReductionError:
        rank, name, static = self.state.rank, self.members[index].name, self.options.static_graph
        if index in self.usage.unused:
            return self._error(messages.used_after_all(rank, name, static=static))
        return self._error(messages.ready_twice(rank, name, self.state.num_iterations, static=static))

    @torch.no_grad()
    def _bucket_full(self, bucket: Bucket) -> None:
        if not self._callback_queued:
            # No output told us that the backward began: forward returned something in which no tensor was found.
            self._call_back_when_over()
        self.state.handle(Event.BUCKET_FULL, bucket=bucket.index)
        for index in self.state.take_launchable():
            self._launch(self.buckets[index])
        if self.state.num_launched == len(self.buckets):
            self.state.handle(Event.LAST_LAUNCHED)
            self.telemetry.current.last_launch_ns = time.time_ns()
            self._ask_usage()

    @torch.no_grad()
    def _backward_ended(self) -> None:
        self._callback_queued = False
        arrived = self._waiting != self._expected or bool(self._seen)
        if arrived and self.state.phase in (Phase.ARMED, Phase.REDUCING):
            self.state.handle(Event.GRADIENT)
            if self._missing_is_unused():
                self._flush()
        if Action.FINALIZE in self.state.handle(Event.BACKWARD_END):
            self._finalize()

    # -- learning -----------------------------------------------------------------------------------------------------

    def _begin_to_learn(self) -> None:
        """Start from buckets that guess nothing, with nothing learnt."""
        self.order, self._ready_ns = [], []
        self._learnt = None
        # A static graph is learnt in its first iteration; the next one counts on it.
        measures = self.options.caps.measured and not self.options.static_graph
        self._num_to_learn_from = NUM_PROFILED if measures else 1
        # Walking the graph finds unused parameters early, so that they hold up no bucket. It is skipped while none is
        # unused: should one be, the end of the backward finds it, and walks begin.
        self._walk_pays = False
        self.caps = self.options.caps
        self.has_rebuilt_buckets = False
        self._adopt(plan_for_unknown_order(self.specs))

    @property
    def _learns_order(self) -> bool:
        return self._num_to_learn_from > 0

    # -- actions ------------------------------------------------------------------------------------------------------

    def _arm(self, reachable: set[int] | None) -> None:
        self._callback_queued = False
        self._marked_unused = False
        self._reachable = reachable
        self.usage.unused.clear()
        self._skipped.clear()
        self._seen = set()
        self._counts = [0] * len(self.members)
        if self.options.static_graph and self._learnt is not None:
            template = self._learnt
        elif self._learns_order or self.options.static_graph:
            template = [_LEARNING] * len(self.members)
        else:
            template = [1] * len(self.members)
        self._waiting[:] = template
        self._expected[:] = template
        for bucket in self.buckets:
            bucket.pending = len(bucket.members)

    def _disarm(self) -> None:
        self._waiting[:] = [0] * len(self.members)
        self._expected[:] = self._waiting
        self._callback_queued = False
        self._seen = set()

    def _mark_unused(self) -> None:
        """At the beginning of a backward, take as ready what it cannot reach."""
        if self.options.static_graph:
            absent = [index for index, count in enumerate(self._learnt or ()) if count == 0]
        elif self.options.find_unused_parameters and self._reachable is not None:
            absent = [index for index in range(len(self.members)) if index not in self._reachable]
        else:
            absent = []
        self._agree_on_skipped(absent)
        touched = self._take_absent(absent)
        self._expected[:] = self._waiting
        for bucket in touched:
            if not bucket.pending:
                self._bucket_full(bucket)

    def _take_absent(self, absent: Iterable[int]) -> list[Bucket]:
        touched: dict[int, Bucket] = {}
        for index in absent:
            self.usage.unused.add(index)
            self._waiting[index] = 0
            bucket = self._bucket_of[index]
            bucket.pending -= 1
            touched[bucket.index] = bucket
        return list(touched.values())

    def _agree_on_skipped(self, absent: Sequence[int]) -> None:
        """Find the buckets that no rank will use, when asked to save their traffic."""
        if self.options.static_graph and self.usage.anywhere is not None:
            used = self.usage.anywhere
        elif self.options.skip_all_reduce_unused_params and self.options.find_unused_parameters:
            used = self.usage.expected_anywhere(absent, self.group, self.device)
        else:
            return
        self._skipped = {
            bucket.index for bucket in self.buckets if not any(used[member.index] for member in bucket.members)
        }

    def _missing_is_unused(self) -> bool:
        return self.options.find_unused_parameters or self.options.static_graph

    def _flush(self) -> None:
        """At the end of a backward, take as unused what has not come."""
        if self.options.static_graph and self._learnt is None:
            self._learnt = list(self._counts)
            for index, count in enumerate(self._counts):
                if count:
                    self._waiting[index] = 0
                    self._bucket_of[index].pending -= 1
        for bucket in self.buckets:
            absent = [m.index for m in bucket.members if self._waiting[m.index] != 0]
            self._take_absent(absent)
            if self.state.buckets[bucket.index] is BucketPhase.FILLING:
                assert bucket.pending == 0, f"bucket {bucket.index} still waits for {bucket.pending} gradients"
                self._bucket_full(bucket)

    def _launch(self, bucket: Bucket) -> None:
        if bucket.index in self._skipped:
            return
        divisor = self.divisor if self.comm_hook is None else 1  # hooks divide as they like
        if bucket.sparse:
            buffer = collect_sparse(bucket.members[0], self._home_of(bucket), self._here())
            if divisor != 1:
                buffer.div_(divisor)
        else:
            buffer = bucket.flat
            # A gradient may be missing although its hook ran: autograd had an undefined one and left `.grad` alone.
            missing = collect(bucket, self._home_of(bucket), self.usage.unused, self._here(), divisor=divisor)
            self.usage.unused.update(bucket.members[place].index for place in missing)
        self._start(bucket, buffer)

    def _start(self, bucket: Bucket, buffer: Tensor) -> None:
        """Set off the reduction of `buffer`, which holds the gradients of `bucket`, divided unless a hook does that."""
        if not self._in_flight:
            self.telemetry.current.first_launch_ns = time.time_ns()
        if self.comm_hook is None:
            self._in_flight[bucket.index] = (buffer, collectives.all_reduce_sum(buffer, self.group))
            return
        is_last = all(index in self._skipped for index in range(bucket.index + 1, len(self.buckets)))
        self._in_flight[bucket.index] = (
            buffer,
            call_hook(self.comm_hook, GradBucket(bucket, buffer, is_last), self._here()),
        )

    def _ask_usage(self) -> None:
        """Ask which parameters some rank used: after the last launch, so that it never delays a gradient."""
        if self.options.static_graph:
            if self.usage.anywhere is not None or not self._learns_order:
                return
        elif not self.options.find_unused_parameters:
            return
        self.usage.begin_agreeing(self.group, self.device)

    def _finalize(self) -> None:
        """Wait for every bucket and hand out the averages: gradients are final when this returns."""
        self.usage.end_agreeing()
        self.num_buckets_reduced = len(self._in_flight)
        for bucket in self.buckets:
            if bucket.index not in self._in_flight:
                continue
            buffer = self._wait_for(bucket)
            hand_out(bucket, self._home_of(bucket), buffer, self._used_by_now(bucket, buffer))
            if self.steps_optimizers:
                step_parameters(bucket)
        for future in self.post_backward_futures:
            future.wait()
        self.post_backward_futures.clear()
        self._num_to_learn_from -= 1
        self._walk_pays = (
            self.options.find_unused_parameters and not self.options.static_graph and bool(self.usage.unused)
        )
        self.usage.end_iteration()
        self._context_id = None
        self._disarm()
        self.telemetry.end()

    def _wait_for(self, bucket: Bucket) -> Tensor:
        """Return what the reduction of `bucket` has made of its gradients."""
        buffer, pending = self._in_flight.pop(bucket.index)
        result = pending.wait()
        if self.comm_hook is None:
            return buffer
        reduced = tensor_in(result, self._here())
        if bucket.sparse:
            return reduced
        if reduced.data_ptr() != buffer.data_ptr():
            buffer.copy_(reduced.view(-1))
        return buffer

    def _used_by_now(self, bucket: Bucket, buffer: Tensor) -> list[bool] | None:
        """Return which parameters some rank used.

        With a static graph that is asked once. Should this rank miss gradients later, all the same, an average of zeros
        tells that no rank had one; then the parameter is left alone, as it is where ranks do ask.
        """
        anywhere = self.usage.anywhere
        if not self.options.static_graph or self._learnt is None or anywhere is None:
            return anywhere
        doubtful = [m.index for m in bucket.members if m.index in self.usage.unused and anywhere[m.index]]
        doubtful = [index for index in doubtful if self._learnt[index]]
        if not doubtful:
            return anywhere
        used = list(anywhere)
        views = [buffer] if bucket.sparse else bucket.views
        for member, view in zip(bucket.members, views, strict=True):
            if member.index in doubtful:
                used[member.index] = bool(view._nnz() if bucket.sparse else view.any())
        return used

    def _get_local_used_map(self) -> Tensor:
        """Return, per parameter, how many ranks used it in the last iteration; int32, 0 where nobody asked."""
        return torch.tensor(self.usage.num_users, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        return self.usage.looks_static

    @property
    def unused_bytes(self) -> int:
        """Bytes of the parameters that this rank did not use in the last iteration."""
        return sum(self.specs[index].num_bytes for index in self.usage.last_unused or ())

    def _adopt(self, plan: BucketPlan) -> None:
        """Allocate buckets for `plan`; gradients that lived in the old ones move into the new."""
        # The views themselves, so that they outlive their buckets: the id of a freed one may be another tensor's.
        old_views = {id(view): view for bucket in self.buckets for view in bucket.views}
        self.buckets = [
            Bucket(
                index,
                [self.members[member] for member in indices],
                dtype=self._communication_dtype(indices[0]),
                holds_gradients=self.options.gradient_as_bucket_view,
            )
            for index, indices in enumerate(plan.buckets)
        ]
        self.state.replan(len(self.buckets))
        self._bucket_of[:] = [self.buckets[index] for index in plan.bucket_of(len(self.members))]
        for bucket in self.buckets:
            for member, view in zip(bucket.members, bucket.views, strict=False):
                gradient = member.parameter.grad
                if gradient is not None and id(gradient) in old_views:
                    with torch.no_grad():
                        view.copy_(gradient)
                    member.parameter.grad = view

    def _error(self, message: str) -> ReductionError:
        return self.telemetry.logged(ReductionError(message))

    def _communication_dtype(self, index: int) -> torch.dtype | None:
        return self.options.reduce_dtype if self.members[index].parameter.is_floating_point() else None

    def _home_of(self, bucket: Bucket) -> GradientHome:
        if self._context_id is not None:
            return autograd_context(self._context_id)
        return LOCAL_SHARD if bucket.distributed else GRAD_ATTRIBUTE

    def _here(self) -> str:
        return f"[rank {self.state.rank}]"
