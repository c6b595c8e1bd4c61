"""How buckets are reduced: gathered, sent, awaited, handed out. When each of this happens is up to the `reducer`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddp_impl.autograd.backwards import Tally
from ddp_impl.base import messages
from ddp_impl.base.errors import ReductionError
from ddp_impl.base.options import ReducerOptions
from ddp_impl.base.telemetry import now_ns
from ddp_impl.buckets.bucket import Bucket, GradBucket
from ddp_impl.buckets.comm_hooks import BoundHook, call_hook, tensor_in
from ddp_impl.buckets.gradient_homes import GRAD_ATTRIBUTE, LOCAL_SHARD, GradientHome, autograd_context
from ddp_impl.buckets.gradients import (
    COPY_IN,
    COPY_IN_DIVIDED,
    collect,
    collect_sparse,
    empty_sparse,
    frozen_in,
    hand_out,
    has_values,
    in_place,
)
from ddp_impl.reducer.iteration import Iteration
from ddp_impl.reducer.optimizer_in_backward import step_parameters
from ddp_impl.reducer.order_check import OrderCheck
from ddp_impl.reducer.reducer_parts import ReducerParts
from ddp_impl.reducer.user_hooks import UserHooks
from ddp_impl.torch_internals.distributed import counter_of
from ddp_impl.wire import collectives
from ddp_impl.wire.forecast import Forecast
from ddp_impl.wire.groups import size_of
from ddp_impl.wire.peers import Peers


class BucketReduction:
    """Reduces the gradients of `members` over `group`, bucket by bucket.

    `divisor` is what sums are divided by: the world size, unless join says otherwise. `comm_hook` reduces in place of
    the default all-reduce. `steps_optimizers`: parameters have optimizers of their own, which step on their averages.
    `post_backward_futures` are awaited before a backward returns, and `agreements` of a join context before the first
    bucket leaves. `buckets` keeps its identity; others fill it.
    `shared` returns the indices of the parameters whose gradients another wrapper averages, too.
    """

    def __init__(self, parts: ReducerParts, options: ReducerOptions, shared: Callable[[], Collection[int]]) -> None:
        """Begin without buckets; `reduce_over` must follow."""
        self.parts = parts
        self.members, self.device, self.buckets = parts.members, parts.device, parts.buckets
        self.state, self.arrivals, self.usage = parts.state, parts.arrivals, parts.usage
        self.search, self.telemetry = parts.search, parts.telemetry
        self.options = options
        self.shared = shared
        self.comm_hook: BoundHook | None = None
        self.steps_optimizers = False
        self.post_backward_futures: list[Future[Any]] = []
        self.user_hooks = UserHooks(self.members)
        self.agreements: list[Callable[[], None]] = []
        self.iteration = Iteration()

    def reduce_over(self, group: dist.ProcessGroup, peers: Peers) -> None:
        """Reduce over `group`, whose ranks are `peers`, from now on; forget what other ranks have agreed on."""
        self.group = group
        self.peers = peers
        self.divisor = size_of(group)
        count = counter_of(group, self.device) if self.divisor > 1 else None
        self.order = OrderCheck(peers, self.device, count, [member.name for member in self.members], self.parts.error)
        self.usage.forget_agreements()
        self.post_backward_futures.clear()
        self.agreements.clear()

    def settle(self) -> None:
        """Wait for what ranks agree on in a forward within a join context, which is on its way."""
        with self.peers.awaiting("backward", "how many ranks still have data") if self.agreements else nullcontext():
            while self.agreements:
                self.agreements.pop(0)()

    def tell_others(self, coming: Sequence[bool]) -> None:
        """Start the exchange of which gradients are sure to come.

        None is sure not to: a function that begins a backward of its own may hide it. Of several forwards none is sure:
        each rank may use a parameter in another of them, where its gradient comes at another moment.
        """
        if self.iteration.num_forwards != 1:
            coming = [False] * len(coming)
        with self.order.own(), self.awaiting_usage():
            self.iteration.forecast = self._forecast(coming)
        self.iteration.has_forecast = True

    def _forecast(self, coming: Sequence[bool] | None) -> Forecast:
        return Forecast(coming, len(self.members), self.order.digest(), self.group, self.device)

    def read_forecast(self) -> None:
        """Wait until it is known which buckets leave within the backward, if that is not known."""
        if not self.ranks_may_differ:
            return
        if not self.iteration.has_forecast:
            self.tell_others(self.search.coming())
        forecast, self.iteration.forecast = self.iteration.forecast, None
        if forecast is not None:
            with self.awaiting_usage():
                told = forecast.result()
            self.hold_back(self.order.early(told, self.buckets))

    def fills(self, bucket: int) -> None:
        """Take note that a bucket has all its gradients."""
        self.iteration.filled[bucket] = self.order.num_others()
        if not (self.arrivals.learns or self.ranks_may_differ or self.order.is_own):
            self.order.count()

    def gradient_came(self, index: int) -> None:
        """Take note of a gradient, in an iteration that is learnt from."""
        if self.arrivals.learns:
            self.iteration.came[index] = self.order.come()
            if not self.ranks_may_differ:
                self.order.count()

    def places(self) -> bytes | None:
        """Return a digest, alike on all ranks if gradients came in one order with other collectives on all of them.

        To be compared once, behind an iteration that is learnt from; None of a rank that has no data.
        """
        return None if self.ranks_may_differ else self.order.places_of(self.iteration.came)

    def iteration_begins(self) -> None:
        """Hold back the buckets with gradients that do not come alike on every rank."""
        if self.arrivals.learns:
            self.order.iteration_begins()
        if self.order.is_own:
            self._hold_all_back()
        elif self.usage.promise is not None:
            self.hold_back(self.usage.promise.alike)

    def backward_begins(self, tally: Tally, *, is_compiled: bool) -> None:
        """Hold all back as long as their order is not known, if the backward has an end to wait for."""
        self.order.backward_begins(tally)
        if self.arrivals.learns and not is_compiled and not self.state.num_launched:
            self._hold_all_back()

    def a_rank_refuses(self) -> bool:
        """Wait for what ranks exchange at the end of this iteration, if they do; return whether one cannot average."""
        if not self.usage.is_agreeing:
            return False
        with self.awaiting_usage():
            self.usage.end_agreeing()
        return self.usage.num_refusing > 0

    def hold_back(self, sure: Sequence[bool]) -> None:
        """Let the buckets leave when the backward is over whose gradients are not all `sure` to come on every rank.

        A comm hook is promised buckets in the order of their index: with one, all behind the first of them are late.
        """
        late = {bucket.index for bucket in self.buckets if not all(sure[member.index] for member in bucket.members)}
        if self.comm_hook is not None and late:
            late = set(range(min(late), len(self.buckets)))
        self.state.hold_back(late)

    def _hold_all_back(self) -> None:
        self.hold_back([False] * len(self.members))

    def _skip_unused(self, used: Sequence[bool]) -> None:
        """Let the buckets not leave at all of which no rank used a parameter."""
        self.iteration.skipped = {
            bucket.index for bucket in self.buckets if not any(used[member.index] for member in bucket.members)
        }

    def agree_on_skipped(self) -> None:
        """Before late buckets leave, find those of which no rank used a parameter, if the user wants traffic saved.

        Collective with `skip_all_reduce_unused_params`.
        """
        if self.options.skip_all_reduce_unused_params and self.ranks_may_differ:
            self._forget_dropped(self.usage.unused)
            with self.order.own(), self.awaiting_usage():
                self._skip_unused(self.usage.used_anywhere(self.group, self.device))

    def awaiting_usage(self) -> AbstractContextManager[None]:
        """Return a context for what ranks exchange about the use of parameters in a backward."""
        return self.peers.awaiting("backward", lambda: messages.usage([member.name for member in self.members]))

    def launch_next(self) -> None:
        """Send the full buckets that are next in order and not held back."""
        for index in self.state.take_launchable():
            self.launch(self.buckets[index])
            if self.steps_optimizers:
                self.hand_out_all_but_the_last()
        if self.state.num_launched == len(self.buckets):
            self.telemetry.current.last_launch = now_ns()

    def launch(self, bucket: Bucket) -> None:
        """Send `bucket`, unless no rank used it."""
        if bucket.index in self.iteration.skipped:
            return
        self.settle()
        try:
            buffer = self._collected(bucket)
        except ReductionError as error:
            self.refuse(error)
            bucket.claim()
            buffer = empty_sparse(bucket.parameters[0]) if bucket.sparse else bucket.flat
        self._start(bucket, buffer)

    def _collected(self, bucket: Bucket) -> Tensor:
        """Return the gradients of `bucket` in one tensor, divided unless a comm hook does that as it likes."""
        divisor = self.divisor if self.comm_hook is None else 1
        home = self._home_of(bucket)
        frozen = frozen_in(bucket) - self.usage.used_locally
        self.usage.unused.update(frozen)
        left_out = set() if self.ranks_may_differ else frozen
        if bucket.sparse:
            member = bucket.members[0]
            missing = [0] if left_out or home.get(member.parameter) is None else []
            buffer = empty_sparse(member.parameter) if left_out else collect_sparse(member, home, self.here())
            if divisor != 1:
                buffer.div_(divisor)
        else:
            # Hooks are promised a buffer of the bucket's, and what no rank uses must survive.
            if self.comm_hook is None and bucket.members[0].index not in self.usage.unused:
                gradient = in_place(bucket, home, divisor=divisor)
                if gradient is not None:
                    return gradient
            bucket.claim()
            buffer = bucket.flat
            kept_out = self.usage.unused.union(self.shared())
            event = COPY_IN_DIVIDED if self.comm_hook is None else COPY_IN
            missing = collect(bucket, home, kept_out, self.here(), divisor=divisor, left_out=left_out, event=event)
        # A gradient may be missing although its hook ran: autograd had an undefined one and left `.grad` alone.
        if missing:
            indices = {bucket.members[place].index for place in missing}
            self.user_hooks.gradients_are_gone(indices - self.usage.unused)
            self.usage.unused.update(indices)
        return buffer

    def _start(self, bucket: Bucket, buffer: Tensor) -> None:
        """Start reducing `buffer`: the gradients of `bucket`, divided unless a comm hook does that."""
        if not self.iteration.in_flight:
            self.telemetry.current.first_launch = now_ns()
        last = next(index for index in reversed(self.state.launch_order) if index not in self.iteration.skipped)
        if self.comm_hook is None:
            with self.order.own(), self.peers.awaiting("backward", partial(self._called, bucket)):
                self.order.leaves(is_last=bucket.index == last)
                self.iteration.in_flight[bucket.index] = (buffer, collectives.all_reduce_sum(buffer, self.group))
            return
        given = GradBucket(bucket, buffer, bucket.index == last)
        self.order.leaves(is_last=bucket.index == last, is_told=self.comm_hook.group() is self.group)
        with self.order.own(), self.peers.communicating("backward", partial(self._called, bucket)):
            self.iteration.in_flight[bucket.index] = (buffer, call_hook(self.comm_hook, given, self.here()))

    def contribute_zeros(self) -> None:
        """Send zeros in the place of every bucket: this rank has no data."""
        self.usage.used_locally.clear()
        self.usage.unused = set(range(len(self.members)))
        if self.ranks_may_differ:
            with self.awaiting_usage():
                told = self._forecast(None).result()
            self.hold_back(self.order.early(told, self.buckets))
        first_late = len(self.buckets) - self.state.num_late
        for place, bucket in enumerate([self.buckets[index] for index in self.state.launch_order]):
            if place == first_late:
                self.agree_on_skipped()
            if bucket.index not in self.iteration.skipped:
                bucket.claim()
                nothing = empty_sparse(bucket.parameters[0]) if bucket.sparse else bucket.flat.zero_()
                bucket.homeless[:] = range(len(bucket.members))
                self._start(bucket, nothing)

    def ask_usage(self) -> None:
        """Start exchanging which parameters ranks used: behind all gradients, so that it delays none.

        With a static graph they know, but not which of those that none uses got gradients under `no_sync`.
        """
        learns = False
        if self.options.static_graph:
            promise = self.usage.promise
            learns = promise is None and self.arrivals.learns_order
            asks_again = promise is not None and not all(promise.used)
            if not learns and not asks_again:
                return
        elif not self.options.find_unused_parameters:
            return
        self._forget_dropped(self.usage.unused)
        refuses, news = self.iteration.refusal is not None, self.order.news
        learnt = (self.arrivals.learnt or [0] * len(self.members)) if learns else None
        with self.order.own(), self.awaiting_usage():
            self.usage.begin_agreeing(self.group, self.device, refuses=refuses, news=news, learnt=learnt)

    def refuse(self, error: ReductionError) -> None:
        """Raise `error`, or have all ranks raise where they exchange what they used at the end of each backward.

        They would wait for this rank otherwise, which may be the only one that uses parameters in this way.
        """
        if not self.ranks_may_differ:
            raise error
        if self.iteration.refusal is None:
            self.iteration.refusal = error
            self.peers.tell(str(error))

    def _forget_dropped(self, unused: Iterable[int]) -> None:
        """Forget earlier use of parameters whose gradient the user has dropped since: nothing of it is to be averaged.

        Otherwise they would get zeros, which an optimizer with momentum or weight decay takes for a gradient.
        """
        if self.iteration.context_id is None:
            earlier = self.usage.used_locally.intersection(unused)
            self.usage.used_locally.difference_update(
                [index for index in earlier if self.members[index].parameter.grad is None]
            )

    def refuse_together(self) -> None:
        """Raise on every rank what one or more of them refuse, when nothing is in flight any more."""
        for bucket in self._in_flight():
            self._wait_for(bucket)
        if self.iteration.refusal is not None:
            raise self.iteration.refusal
        if self.order.news == self.usage.news == 1:
            raise self.order.met_others()
        raise self.parts.error(messages.others_refuse(self.state.rank) + self.peers.exchange(messages.FOLLOWS))

    def hand_out_averages(self) -> None:
        """Wait for every bucket and put the averages where users look for gradients."""
        self.order.iteration_ends(self.iteration.filled, self.iteration.came)
        self.telemetry.num_buckets_reduced = len(self.buckets) - len(self.iteration.skipped)
        # All before any is handed out: where one has failed, no gradient has changed.
        reduced = [(bucket, self._wait_for(bucket)) for bucket in self._in_flight()]
        while self.post_backward_futures:
            with self.peers.awaiting("backward", "the futures of the buffer comm hook"):
                collectives.value_of(self.post_backward_futures.pop(0))
        self.order.check([buffer for _, buffer in reduced])
        for bucket, buffer in reduced:
            self._hand_out(bucket, buffer, used := self._used_by_now(bucket, buffer))
            if self.steps_optimizers:
                self.iteration.to_step.append((bucket, used))

    def hand_out_all_but_the_last(self) -> None:
        """Hand out the averages of all buckets but the last one launched, so that their parameters step in backward.

        Hence no more than two buckets of gradients are alive: one that is on its way and one that fills. Where other
        ranks may still refuse to average, or know better what is unused, or another wrapper awaits the same gradient,
        everything waits for the end of the backward.
        """
        if self.ranks_may_differ:
            return
        for bucket in self._in_flight()[:-1]:
            if bucket.indices.isdisjoint(self.usage.unused) and bucket.indices.isdisjoint(self.shared()):
                self.user_hooks.averages_come(bucket.indices)
                self._hand_out(bucket, self._wait_for(bucket), None)
                self.step(bucket, None)

    def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Sequence[bool] | None) -> None:
        hand_out(bucket, self._home_of(bucket), buffer, used)
        bucket.gradients = []

    def step(self, bucket: Bucket, used: Sequence[bool] | None) -> None:
        """Step the optimizers that parameters of `bucket` have of their own, on averages, where some rank used them."""
        if step_parameters(bucket, used):
            bucket.release()

    def step_all(self) -> None:
        """Step those that wait for all averages."""
        while self.iteration.to_step:
            self.step(*self.iteration.to_step.pop())

    def _wait_for(self, bucket: Bucket) -> Tensor:
        """Return what the reduction of `bucket` has made of its gradients."""
        buffer, pending = self.iteration.in_flight.pop(bucket.index)
        with self.peers.awaiting("backward", partial(self._called, bucket)):
            if self.comm_hook is None:
                collectives.finished(pending, "all_reduce", [buffer])
                return buffer
            reduced = tensor_in(collectives.value_of(pending), buffer, self.here())
        if bucket.sparse:
            return reduced
        if reduced.data_ptr() != buffer.data_ptr():
            buffer.copy_(reduced.view(-1))
        return buffer

    def _in_flight(self) -> list[Bucket]:
        """Return the buckets that have left and are not handed out, in the order in which they left."""
        return [self.buckets[index] for index in self.iteration.in_flight]

    def _called(self, bucket: Bucket) -> str:
        names = [member.name for member in bucket.members]
        how = "all_reduce" if self.comm_hook is None else "comm hook"
        return f"the {how} of {messages.bucket(bucket.index, len(self.buckets), names)}"

    def _used_by_now(self, bucket: Bucket, buffer: Tensor) -> list[bool] | None:
        """Return which parameters some rank used.

        With a static graph ranks rarely exchange that, without `find_unused_parameters` never. Should this rank miss
        a gradient all the same, because the graph is not static or the parameter was frozen, an average of zeros means
        that no rank had one, and the reducer leaves the parameter alone, as it does after an exchange.

        Raises `ReductionError` where a parameter is frozen here alone and has a gradient: the average lacks it.
        """
        anywhere, learnt, unused = self.usage.anywhere, self.arrivals.learnt, self.usage.unused
        if not unused or self.usage.is_exchanged:
            return anywhere
        used = [True] * len(self.members) if anywhere is None else list(anywhere)
        for place, member in enumerate(bucket.members):
            index = member.index
            missed = self.is_frozen(index) if learnt is None else learnt[index]
            if index in unused and missed and used[index]:
                used[index] = has_values(bucket, buffer, place)
                lost = member.parameter.grad is not None and index not in self.usage.used_locally
                if used[index] and lost and self.is_frozen(index):
                    raise self.parts.error(messages.frozen_here(self.state.rank, member.name))
        return used

    def is_frozen(self, index: int) -> bool:
        """Whether the user has taken a parameter out of the training since wrapping."""
        return not self.members[index].parameter.requires_grad

    @property
    def ranks_may_differ(self) -> bool:
        """Whether ranks tell each other what they use, before an iteration's gradients come and after."""
        return self.options.find_unused_parameters and not self.options.static_graph

    @property
    def last_gradient_ends_it(self) -> bool:
        """Whether all can be handed out when the last gradient comes, though the backward goes on; alike on all ranks.

        Not where gradients may be missing or another wrapper awaits some of them, too; nor where parameters may step
        then, as a comm hook can have them do: what compiled autograd has captured may read them later.
        """
        if torch.compiler.is_dynamo_compiling():  # with fullgraph=True, which leaves no hook as it is
            return False
        options = self.options
        waits = options.find_unused_parameters or options.static_graph or options.delayed or self.shared()
        return not (waits or self.steps_optimizers or self.comm_hook is not None)

    def _home_of(self, bucket: Bucket) -> GradientHome:
        if self.iteration.context_id is not None:
            return autograd_context(self.iteration.context_id)
        return LOCAL_SHARD if bucket.distributed else GRAD_ATTRIBUTE

    def here(self) -> str:
        """Return which rank this is, for errors."""
        return f"[rank {self.state.rank}]"
