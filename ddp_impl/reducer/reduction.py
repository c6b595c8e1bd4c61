"""How buckets are reduced: gathered, launched, awaited, handed out, stepped on. The `reducer` decides when."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddp_impl.autograd.hooks import AutogradHooks, GraphSearch
from ddp_impl.autograd.marks import Anchor
from ddp_impl.base import messages
from ddp_impl.base.errors import ReductionError
from ddp_impl.base.messages import enumerate_names
from ddp_impl.base.options import ReducerOptions
from ddp_impl.base.telemetry import Observer, Telemetry, now_ns
from ddp_impl.buckets import gradients
from ddp_impl.buckets.arrivals import Arrivals
from ddp_impl.buckets.bucket import Bucket, GradBucket, ManagedParameter
from ddp_impl.buckets.comm_hooks import BoundHook, call_hook, tensor_in
from ddp_impl.buckets.gradients import GradientHome
from ddp_impl.reducer.company import Order
from ddp_impl.reducer.iteration import Iteration, Learnt, Progress
from ddp_impl.torch_internals.tensors import (
    in_backward_hooks,
    in_backward_optimizers,
    num_post_accumulate_hooks,
    version_of,
)
from ddp_impl.wire import collectives
from ddp_impl.wire.collectives import rank_in, size_of
from ddp_impl.wire.peers import Peers, slow_waits
from ddp_impl.wire.round import Round


class Reduction:
    """Reduces the gradients of `members` over `group`, bucket by bucket.

    `divisor` is what sums are divided by: the world size, unless join says otherwise. `comm_hook` reduces in place of
    the default all_reduce. `steps_optimizers`: parameters have optimizers of their own, which step on their averages.
    `used_locally`: parameters that earlier backwards without synchronisation used; `follows_local`: such forwards
    preceded this iteration, on every rank the same ones. `post_backward_futures` are awaited before a backward returns,
    and `join_agreements` before the first bucket leaves. `ranks_may_differ`: ranks may use different parameters, so one
    rank may refuse the averages. `prefix`: the begin of errors. `buckets` and `used_locally` keep their identity.
    """

    def __init__(
        self, members: Sequence[ManagedParameter], device: torch.device, options: ReducerOptions, hooks: AutogradHooks,
        anchor: Anchor, arrivals: Arrivals,
    ) -> None:  # fmt: skip
        """Begin without buckets; `reduce_over` must follow."""
        self.members, self.device, self.options = tuple(members), device, options
        self.hooks, self.anchor, self.arrivals = hooks, anchor, arrivals
        self.graph = GraphSearch([member.parameter for member in members])
        self.telemetry = Telemetry()
        self.user_hooks = UserHooks(self.members, self.telemetry)
        self.buckets: list[Bucket] = []
        self.comm_hook: BoundHook | None = None
        self.steps_optimizers = False
        self.ranks_may_differ = False
        self.used_locally: set[int] = set()
        self.follows_local = False
        self.iteration = Iteration(-1)
        self.post_backward_futures: list[Future[Any]] = []
        self.join_agreements: list[Callable[[], None]] = []

    def reduce_over(self, group: dist.ProcessGroup, peers: Peers) -> None:
        """Reduce over `group`, whose ranks are `peers`, from now on; forget what other ranks have agreed on."""
        self.group, self.peers = group, peers
        self.rank, self.num_ranks = rank_in(group), size_of(group)
        self.prefix = f"[rank {self.rank}]"
        self.divisor = self.num_ranks
        self.order = Order(group, self.device)
        self.learnt = Learnt(self.options.caps)
        self.forget_iteration()
        self.post_backward_futures.clear()
        self.join_agreements.clear()

    def forget_iteration(self) -> None:
        """Drop the last iteration in whatever state, be idle, and expect no gradient."""
        self.iteration = Iteration(self.rank, self.iteration.number, range(len(self.buckets)))
        self.arrivals.disarm()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Hold no gradient on behalf of averages that nobody will hand out."""
        for bucket in self.buckets:
            bucket.gradients = []

    def error(self, message: str) -> ReductionError:
        """Return an error to be raised; the logging data will contain it, too."""
        return self.telemetry.logged(ReductionError(message))

    def is_frozen(self, index: int) -> bool:
        """Whether the user has taken a parameter out of the training since wrapping."""
        return not self.members[index].parameter.requires_grad

    # -- which buckets leave when -------------------------------------------------------------------------------------

    def launch_uncertain_after_backward(self, certain: Sequence[bool]) -> None:
        """Hold back the buckets whose gradients are not all `certain`; with a comm hook, all behind the first one.

        If all of those may be skipped, hold back the one before them, too: the hook must learn that it is the last one.
        """
        uncertain = {index for index, is_certain in enumerate(certain) if not is_certain}
        late = set[int]()
        if uncertain:
            late.update(bucket.index for bucket in self.buckets if not bucket.indices.isdisjoint(uncertain))
        if self.comm_hook is not None and late:
            first = min(late)
            may_skip = self.options.skip_all_reduce_unused_params and self.ranks_may_differ
            if may_skip and all(bucket.indices <= uncertain for bucket in self.buckets[first:]):
                first = max(0, first - 1)
            late = set(range(first, len(self.buckets)))
        self.iteration.launch_after_backward(late)

    def launch_all_after_backward(self) -> None:
        """Let every bucket leave behind the backward."""
        self.iteration.launch_after_backward(range(len(self.buckets)))

    def release_late(self) -> None:
        """Let the late buckets leave: the backward is over. Collective with `skip_all_reduce_unused_params`."""
        self._agree_on_skipped()
        self.iteration.num_late = 0

    def _agree_on_skipped(self) -> None:
        if not (self.options.skip_all_reduce_unused_params and self.ranks_may_differ):
            return
        self.forget_dropped()
        with self.order.counting_own_collectives(), self.awaiting_usage():
            answer = Round(self.group, self.device, counts=self.used(self.used_locally), waits=False).result()
        self.iteration.skipped = {
            bucket.index for bucket in self.buckets if not any(answer.counts[index] for index in bucket.indices)
        }

    # -- buckets leave ------------------------------------------------------------------------------------------------

    def await_join_agreements(self) -> None:
        """Wait for the exchanges that forwards within a join context have started."""
        if self.join_agreements:
            with self.peers.awaiting("backward", "how many ranks still have data"):
                while self.join_agreements:
                    self.join_agreements.pop(0)()

    def launch(self, bucket: Bucket) -> None:
        """Collect the gradients of `bucket` and send them, unless no rank used it."""
        if bucket.index in self.iteration.skipped:
            return
        if self.join_agreements:
            self.await_join_agreements()
        try:
            buffer = self.collect(bucket)
        except ReductionError as error:
            self.refuse(error)
            bucket.claim()
            buffer = gradients.empty_sparse(bucket.parameters[0]) if bucket.sparse else bucket.flat
        self.send(bucket, buffer)

    def collect(self, bucket: Bucket) -> Tensor:
        """Return the gradients of `bucket` in one tensor, divided unless there is a comm hook, which divides itself."""
        iteration, hook = self.iteration, self.comm_hook
        unused, divisor = iteration.unused, self.divisor if hook is None else 1
        home = gradients.GRAD_ATTRIBUTE
        if bucket.distributed or iteration.context_id is not None:
            home = self.home_of(bucket)
        left_out: Collection[int] = ()
        if frozen := gradients.frozen_in(bucket):
            frozen -= self.used_locally
            unused |= frozen
            left_out = () if self.ranks_may_differ else frozen
        if bucket.sparse:
            return self._collect_sparse(bucket, home, is_left_out=bool(left_out), divisor=divisor)
        # Hooks are promised a buffer of the bucket's, and what no rank uses must survive.
        if bucket.reduces_in_place and hook is None and bucket.members[0].index not in unused:
            gradient = gradients.in_place(bucket, home, divisor=divisor)
            if gradient is not None:
                return gradient
        if not bucket.views:
            bucket.claim()
        shared = self.hooks.shared()
        missing = gradients.collect(
            bucket, home, unused | shared if shared else unused, self.prefix,
            divisor=divisor, left_out=left_out, event=gradients.COPY_IN_DIVIDED if hook is None else gradients.COPY_IN,
        )  # fmt: skip
        if missing:
            self._are_gone(bucket, missing)
        return bucket.flat

    def _collect_sparse(self, bucket: Bucket, home: GradientHome, *, is_left_out: bool, divisor: int) -> Tensor:
        member = bucket.members[0]
        if is_left_out or home.get(member.parameter) is None:
            self._are_gone(bucket, [0])
        buffer = (
            gradients.empty_sparse(member.parameter)
            if is_left_out
            else gradients.collect_sparse(member, home, self.prefix)
        )
        return buffer.div_(divisor) if divisor != 1 else buffer

    def _are_gone(self, bucket: Bucket, places: Iterable[int]) -> None:
        """Count as unused what has no gradient although its hook ran: autograd's was undefined and left `.grad`."""
        indices = {bucket.members[place].index for place in places}
        self.user_hooks.gradients_are_gone(indices - self.iteration.unused)
        self.iteration.unused.update(indices)

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        """Start reducing `buffer`: the gradients of `bucket`, divided unless a comm hook does that."""
        iteration, peers, order = self.iteration, self.peers, self.order
        if not iteration.in_flight:
            self.telemetry.current.first_launch = now_ns()
        what = partial(self.in_words, bucket)
        if peers.lost or peers.company.has_failed:
            peers.refuse_lost("backward", what)
        peers.wait = (monotonic(), "backward", what)
        if slow_waits.watcher is None and self.num_ranks > 1:
            slow_waits.start()
        num_begun = order.now() if order.tally is not None else 0
        try:
            if self.comm_hook is None:
                pending: Any = collectives.all_reduce_sum(buffer, self.group)
            else:
                skipped = iteration.skipped
                last = next(index for index in reversed(iteration.launch_order) if index not in skipped)
                given = GradBucket(bucket, buffer, bucket.index == last)
                pending = call_hook(self.comm_hook, given, self.prefix)
        except BaseException as error:
            peers.failed("backward", what, error, with_reports=self.comm_hook is None)
            raise
        peers.wait = None
        if order.tally is not None:
            order.tally.own += order.now() - num_begun
        iteration.in_flight[bucket.index] = (buffer, pending)

    def send_zeros(self) -> None:
        """Send zeros in the place of every bucket: this rank has no data."""
        iteration = self.iteration
        self.used_locally.clear()
        iteration.unused = set(range(len(self.members)))
        first_late = len(self.buckets) - iteration.num_late
        for place, index in enumerate(iteration.launch_order):
            bucket = self.buckets[index]
            if place == first_late:
                self._agree_on_skipped()
            if index not in iteration.skipped:
                bucket.claim()
                nothing = gradients.empty_sparse(bucket.parameters[0]) if bucket.sparse else bucket.flat.zero_()
                bucket.detached_from_view[:] = range(len(bucket.members))
                self.send(bucket, nothing)

    # -- what ranks used ----------------------------------------------------------------------------------------------

    def awaiting_usage(self) -> AbstractContextManager[None]:
        """Return a context for what ranks exchange about the use of parameters in a backward."""
        return self.peers.awaiting("backward", lambda: messages.usage([member.name for member in self.members]))

    def start_usage(self, *, promised: Sequence[int] = (), waits: bool = False) -> None:
        """Start to exchange which parameters ranks used and whether one refuses; every rank between the same ones.

        `promised`: how many gradients each parameter gets in every iteration. To read the answer, a host waits for its
        device: on an accelerator only where a gradient is missing or this rank refuses; other ranks read it later
        (`was_refused_before`). With `waits` hosts exchange it, if the group can reduce on hosts.
        """
        self.forget_dropped()
        iteration = self.iteration
        refuses = iteration.refusal is not None
        iteration.reads_usage = (
            self.device.type == "cpu" or refuses or bool(promised) or waits or not iteration.unused <= self.used_locally
        )
        counts = [*self.used(self.used_locally), refuses, iteration.reads_usage, *(self.used() if promised else ())]
        with self.order.counting_own_collectives(), self.awaiting_usage():
            iteration.usage = Round(self.group, self.device, counts=counts, alike=promised, waits=waits)

    def read_usage(self) -> bool:
        """Wait for the exchange that is on its way; return whether a rank refuses."""
        iteration, learnt = self.iteration, self.learnt
        usage, iteration.usage, iteration.is_exchanged = iteration.usage, None, True
        assert usage is not None  # noqa: S101  # the caller has asked
        if not iteration.reads_usage:
            usage.defer()
            learnt.unread.append(usage)
            iteration.used_anywhere = None  # this rank used all of them
            return False
        learnt.unread.clear()
        learnt.last_usage = usage.result()
        iteration.used_anywhere = [count > 0 for count in learnt.last_usage.counts[: len(self.members)]]
        return self.num_refusing > 0

    def was_refused_before(self) -> bool:
        """Whether a rank refused in an earlier iteration, by the answers that have arrived; true only once."""
        learnt = self.learnt
        while learnt.unread and learnt.unread[0].is_here:
            learnt.last_usage = learnt.unread.popleft().result()
            if self.num_refusing:
                learnt.unread.clear()
                return True
        return False

    @property
    def num_refusing(self) -> int:
        """How many ranks refused in the last exchange."""
        return 0 if self.learnt.last_usage is None else self.learnt.last_usage.counts[len(self.members)]

    @property
    def all_read(self) -> bool:
        """Whether every rank has read the last exchange."""
        answer = self.learnt.last_usage
        return answer is not None and answer.counts[len(self.members) + 1] == answer.num_ranks

    def num_users(self) -> list[int]:
        """Return how many ranks used each parameter in the last exchange; makes the host wait if it has not read it."""
        answer = self.learnt.unread[-1].result() if self.learnt.unread else self.learnt.last_usage
        return [0] * len(self.members) if answer is None else answer.counts[: len(self.members)]

    def used(self, used_before: Collection[int] = ()) -> list[bool]:
        """Return whether this rank used each parameter, now or `used_before`."""
        unused = self.iteration.unused
        return [index not in unused or index in used_before for index in range(len(self.members))]

    def forget_dropped(self) -> None:
        """Forget earlier use of parameters whose gradient the user has dropped: an optimizer would step on zeros."""
        if self.iteration.context_id is None:
            earlier = self.used_locally.intersection(self.iteration.unused)
            self.used_locally -= {index for index in earlier if self.members[index].parameter.grad is None}

    def refuse(self, error: ReductionError) -> None:
        """Raise `error`; where ranks exchange refusals, keep it: all ranks raise when the iteration ends."""
        if not self.ranks_may_differ:
            raise error
        if self.iteration.refusal is None:
            self.iteration.refusal = error
            self.peers.publish(str(error))

    def refuse_together(self) -> None:
        """Wait for everything in flight, and raise this rank's refusal or the error that another rank has refused."""
        for bucket in self._in_flight():
            self.wait(bucket)
            if self.options.lazy_bucket_allocation:
                bucket.release()
        self._drop_gradients()
        refusal, self.iteration.refusal = self.iteration.refusal, None
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # its traceback would hold this frame, and all that the user's frames hold
        raise self.error(messages.others_refuse(self.rank) + self.peers.exchange(messages.FOLLOWS))

    # -- averages arrive ----------------------------------------------------------------------------------------------

    def finalize_buckets(self) -> None:
        """Wait for every bucket and put the averages where users look for gradients."""
        iteration, to_step = self.iteration, self.iteration.to_step
        self.telemetry.num_buckets_reduced = len(self.buckets) - len(iteration.skipped)
        # All before any is handed out: where one has failed, no gradient has changed.
        reduced = []
        for index in list(iteration.in_flight):
            bucket = self.buckets[index]
            reduced.append((bucket, self.wait(bucket)))
        while self.post_backward_futures:
            with self.peers.awaiting("backward", "the futures of the buffer comm hook"):
                collectives.value_of(self.post_backward_futures.pop(0), self.group, self.device)
        for bucket, buffer in reduced:
            used = iteration.used_anywhere
            if iteration.unused and not iteration.is_exchanged:
                used = self.used_by_now(bucket, buffer)
            self.hand_out(bucket, buffer, used)
            if self.steps_optimizers:
                to_step.append((bucket, used))

    def hide_gradients(self) -> None:
        """Replace gradients, which are in flight, by tensors that raise on use, until `reveal_gradients`."""
        if self.iteration.context_id is None:
            self.iteration.hidden = [
                gradients.hide(member.parameter, messages.not_final(self.rank, member.name)) for member in self.members
            ]

    def reveal_gradients(self) -> None:
        """Put back the gradients that were hidden; raises where no backward has left any to the user."""
        if self.iteration.progress is not Progress.HELD:
            raise self.error(messages.nothing_to_finalize(self.rank, by_hand=self.options.finalizes_by_hand))
        while self.iteration.hidden:
            self.iteration.hidden.pop().reveal()

    def hand_out_all_but_the_last(self) -> None:
        """Hand out all averages but those of the last bucket launched, so that parameters step in backward.

        At the end instead where ranks may refuse, another wrapper awaits the gradient, or the user finalizes by hand.
        """
        if self.ranks_may_differ or self.options.finalizes_by_hand:
            return
        for bucket in self._in_flight()[:-1]:
            if bucket.indices.isdisjoint(self.iteration.unused) and bucket.indices.isdisjoint(self.hooks.shared()):
                self.user_hooks.before_averages(bucket.indices)
                self.hand_out(bucket, self.wait(bucket), None)
                self.step(bucket, None)

    def wait(self, bucket: Bucket) -> Tensor:
        """Wait for the reduction of `bucket`; return its averages."""
        peers, what = self.peers, partial(self.in_words, bucket)
        buffer, pending = self.iteration.in_flight.pop(bucket.index)
        if peers.lost or peers.company.has_failed:
            peers.refuse_lost("backward", what)
        peers.wait = (monotonic(), "backward", what)
        if slow_waits.watcher is None and self.num_ranks > 1:
            slow_waits.start()
        try:
            if self.comm_hook is None:
                collectives.finished(pending, "all_reduce", [buffer])
                reduced = buffer
            else:
                reduced = tensor_in(collectives.value_of(pending, self.group, self.device), buffer, self.prefix)
        except BaseException as error:
            peers.failed("backward", what, error)
            raise
        peers.wait = None
        if bucket.sparse:
            return reduced
        if reduced is not buffer and reduced.data_ptr() != buffer.data_ptr():
            buffer.copy_(reduced.view(-1))
        return buffer

    def hand_out(self, bucket: Bucket, buffer: Tensor, used: Sequence[bool] | None) -> None:
        """Write averages from `buffer` to where gradients live; `used[i]`: any rank used parameter i (None: all)."""
        is_plain = self.iteration.context_id is None and not bucket.distributed
        gradients.hand_out(bucket, gradients.GRAD_ATTRIBUTE if is_plain else self.home_of(bucket), buffer, used)
        bucket.gradients = []
        if self.options.lazy_bucket_allocation:
            bucket.release()

    def step(self, bucket: Bucket, used: Sequence[bool] | None) -> None:
        """Step the optimizers that parameters of `bucket` have of their own, on averages, where some rank used them."""
        if step_parameters(bucket, used):
            bucket.release()

    def used_by_now(self, bucket: Bucket, buffer: Tensor) -> Sequence[bool] | None:
        """Return which parameters some rank used, for ranks that do not exchange it: with a static graph or no option.

        A parameter that misses a gradient all the same is left alone if its average is zero. Raises `ReductionError`
        where one is frozen here alone and has a gradient: the average lacks it.
        """
        anywhere, learnt = self.iteration.used_anywhere, self.arrivals.learnt
        used = [True] * len(self.members) if anywhere is None else list(anywhere)
        for place, member in enumerate(bucket.members):
            index = member.index
            missed = self.is_frozen(index) if learnt is None else learnt[index]
            if index in self.iteration.unused and missed and used[index]:
                used[index] = gradients.has_values(bucket, buffer, place)
                lost = member.parameter.grad is not None and index not in self.used_locally
                if used[index] and lost and self.is_frozen(index):
                    raise self.error(messages.frozen_here(self.rank, member.name))
        return used

    def may_finalize_in_backward(self, *, allows_absence: bool) -> bool:
        """Whether averages can be handed out with the last gradient, though backward goes on; alike on all ranks."""
        if torch.compiler.is_dynamo_compiling():  # with fullgraph=True, which leaves no hook as it is
            return False
        waits = allows_absence or self.options.delayed or self.hooks.shared()
        return not (waits or self.steps_optimizers or self.comm_hook is not None)

    def in_words(self, bucket: Bucket) -> str:
        """Return how messages call the reduction of `bucket`."""
        names = [member.name for member in bucket.members]
        how = "all_reduce" if self.comm_hook is None else f"comm hook {self.telemetry.comm_hook}"
        return f"the {how} of {messages.bucket(bucket.index, len(self.buckets), names)}"

    def _in_flight(self) -> list[Bucket]:
        """Return the buckets that have left and are not handed out, in the order in which they left."""
        return [self.buckets[index] for index in self.iteration.in_flight]

    def home_of(self, bucket: Bucket) -> GradientHome:
        """Return where the gradients of `bucket` are."""
        if self.iteration.context_id is not None:
            return gradients.autograd_context(self.iteration.context_id)
        return gradients.LOCAL_SHARD if bucket.distributed else gradients.GRAD_ATTRIBUTE


class UserHooks(Observer):
    """Watches parameters with hooks of the user's (`hooked`): an optimizer there steps on a local gradient.

    Its signs are that the gradient is gone, or that the parameter has changed when the backward ends.
    """

    def __init__(self, members: Sequence[ManagedParameter], telemetry: Telemetry) -> None:
        self._members, self._telemetry = members, telemetry
        self.hooked: list[ManagedParameter] = []
        self._versions: dict[int, int] = {}
        self._gone: set[int] = set()
        self._seen: set[int] = set()
        self._stepped: list[str] = []

    def search(self) -> None:
        """Find the parameters with more hooks than the reducer's."""
        self.hooked = [member for member in self._members if num_post_accumulate_hooks(member.parameter) > 1]

    def backward_begins(self, *, is_first: bool) -> None:
        """Remember the parameters as they are."""
        if is_first:
            self._gone, self._seen, self._stepped = set(), set(), []
        self._versions = {member.index: version_of(member.parameter) for member in self.hooked}

    def gradients_are_gone(self, indices: Collection[int]) -> None:
        """Note parameters whose gradients arrived and were gone when their bucket was full."""
        if self.hooked:
            self._gone.update(indices)

    def before_averages(self, indices: Collection[int], unused: Collection[int] = ()) -> None:
        """Look, once in an iteration, at these parameters before averages are handed out; `unused` have no gradient."""
        for member in self.hooked:
            if member.index not in indices or member.index in self._seen:
                continue
            self._seen.add(member.index)
            version = version_of(member.parameter)
            is_gone = member.parameter.grad is None and (member.index in self._gone or member.index not in unused)
            if version != self._versions.get(member.index, version) or is_gone:
                self._stepped.append(member.name)

    def backward_ended(self, unused: Collection[int], prefix: str) -> None:
        """Warn, once, of parameters that were stepped."""
        self.before_averages(range(len(self._members)), unused)
        if self._stepped:
            self._telemetry.warn_once(
                "hooks",
                f"{prefix} a hook of yours (register_post_accumulate_grad_hook) changed "
                f"{enumerate_names(self._stepped)} or "
                "took the gradient away before DDP had averaged it. An optimizer in such a hook steps on this rank's "
                "own gradient, and the parameters of the ranks drift apart. Let DDP step it, when the average is there "
                "(torch.distributed.optim._apply_optimizer_in_backward), or step after backward.",
            )


def take_over_optimizers(members: Sequence[ManagedParameter]) -> bool:
    """Whether members have in-backward optimizers; their hooks, which would step on local gradients, are removed."""
    owners = [member.parameter for member in members if in_backward_optimizers(member.parameter)]
    if not owners:
        return False
    for parameter in owners:
        for handle in in_backward_hooks(parameter):
            handle.remove()
    return True


def step_parameters(bucket: Bucket, used: Sequence[bool] | None) -> bool:
    """Step the optimizers of parameters in `bucket` that some rank `used`; return whether no gradient is left.

    Gradients are None afterwards, unless `DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE=0` is in the environment.
    """
    set_to_none = os.environ.get("DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE", "1") != "0"
    for member in bucket.members:
        parameter = member.parameter
        if parameter.grad is not None and (used is None or used[member.index]):
            for optimizer in in_backward_optimizers(parameter):
                optimizer.step()
            if set_to_none and in_backward_optimizers(parameter):
                parameter.grad = None
    return all(parameter.grad is None for parameter in bucket.parameters)
