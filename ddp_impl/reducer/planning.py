"""Plans buckets and allocates them: without a guess at first, later by the order in which rank 0's gradients came."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist

from ddp_impl.base import messages
from ddp_impl.base.logs import is_verbose, milestone
from ddp_impl.base.options import BucketCaps, ReducerOptions
from ddp_impl.buckets.auto_caps import NUM_PROFILED, PROBE_BYTES, AllReduceCost, choose_caps
from ddp_impl.buckets.bucket import allocate
from ddp_impl.buckets.device_times import DeviceTimes
from ddp_impl.buckets.plan import BucketPlan, plan_for_order, plan_for_unknown_order
from ddp_impl.reducer.order_check import OrderCheck
from ddp_impl.reducer.reducer_parts import ReducerParts
from ddp_impl.reducer.reducer_state import Phase
from ddp_impl.wire import collectives
from ddp_impl.wire.order_exchange import OrderExchange
from ddp_impl.wire.peers import Peers


class BucketPlanning:
    """Fills `buckets`, a list that keeps its identity, for the gradients of `members`.

    `caps` are those of the present plan; `has_rebuilt_buckets`: it follows rank 0's order. `state`, `arrivals` and
    `early_moves` are told of every new plan.
    """

    def __init__(self, parts: ReducerParts, options: ReducerOptions) -> None:
        """Plan one bucket per kind of gradient."""
        self.members, self.buckets = parts.members, parts.buckets
        self.specs = [member.spec(options) for member in self.members]
        self.state, self.arrivals, self.telemetry = parts.state, parts.arrivals, parts.telemetry
        self._parts = parts
        self._device, self._early_moves = parts.device, parts.early_moves
        self._exchange: OrderExchange | None = None  # on its way
        self._order_of_rank_0: list[int] = []  # behind the number of its wrapper, until buckets are planned by it
        on_one_accelerator = self._device.type != "cpu" and len(parts.devices) == 1
        self._device_times = DeviceTimes(self._device) if on_one_accelerator and options.caps.measured else None
        self.begin_to_learn(options)

    def begin_to_learn(self, options: ReducerOptions) -> None:
        """Start from buckets that guess nothing, with nothing learnt."""
        self.options = options
        # A static graph is learnt in its first iteration; the next one counts on it.
        measures = options.caps.measured and not options.static_graph
        self.arrivals.forget(NUM_PROFILED if measures else 1)
        self.caps = options.caps
        self.has_rebuilt_buckets = False
        self._exchange = None
        self._order_of_rank_0.clear()
        self._adopt(plan_for_unknown_order(self.specs))

    def backward_begins(self) -> None:
        """Count times on the device from here, in an iteration that is learnt from."""
        if self._device_times is not None and self.arrivals.learns_order:
            self._device_times.begin()

    def gradient_came(self, index: int) -> None:
        """Note when the device comes to a gradient, in an iteration that is learnt from."""
        if self._device_times is not None and self.arrivals.learns_order:
            self._device_times.note(index)

    def exchange_order(self, group: dist.ProcessGroup, peers: Peers, places: Callable[[], bytes | None]) -> None:
        """Send rank 0's order of gradients, once, at the end of the last iteration that it is learnt from.

        With it goes this rank's digest of `places`. There, behind all that has been sent and before anything is waited
        for: one rank may run in one backward what another runs in several. Not in the next forward: what ranks run
        between two backwards may wait for another rank's, as the stages of a pipeline do, and they may run forwards of
        several wrappers in different orders. Not to be called once buckets are rebuilt: nothing is left to tell.
        """
        is_known = self._exchange or self._order_of_rank_0
        has_sent = self.state.phase is Phase.SENT
        if is_known or self.arrivals.num_to_learn_from > has_sent or not (has_sent or self.state.phase is Phase.IDLE):
            return
        told = [peers.number, *self.arrivals.order]
        with peers.awaiting("backward", self._awaited):
            self._exchange = OrderExchange(told, 1 + len(self.members), places(), group, self._device)

    def await_order(self, peers: Peers, check: OrderCheck) -> None:
        """Wait for what ranks tell each other of their orders, if that is on its way; tell `check` if they differ."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            with peers.awaiting("backward", self._awaited):
                self._order_of_rank_0, has_one_order = exchange.result()
            if not has_one_order:
                check.differs()

    def _awaited(self) -> str:
        return messages.order([member.name for member in self.members])

    def rebuild(
        self, group: dist.ProcessGroup, peers: Peers, awaiting: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        """Plan buckets anew from the order in which gradients came on rank 0; once, when it is known.

        Collective with `bucket_cap_mb="auto"`, in a context that `awaiting(what)` returns. Raises `ReductionError` if
        rank 0 has sent the order of another wrapper.
        """
        if not self._order_of_rank_0 or self.state.phase is not Phase.IDLE:
            return
        number, *order = self._order_of_rank_0
        if number != peers.number:
            text = messages.another_wrapper(self.state.rank, peers.number, number)
            peers.tell(text)
            raise self._parts.error(text)
        if self.options.caps.measured:
            with awaiting("the times of the ranks' all-reduces"):
                self.caps = self._choose_caps(group)
        self._adopt(plan_for_order(self.specs, order, self.caps))
        self._order_of_rank_0.clear()
        self.has_rebuilt_buckets = True
        self.log_plan(f"has rebuilt its buckets after {self.telemetry.num_iterations} iterations")

    def log_plan(self, what: str) -> None:
        """Log `what` happened, and the buckets as they are now."""
        buckets = [(bucket.num_bytes, [member.name for member in bucket.members]) for bucket in self.buckets]
        milestone(messages.planned(self.state.rank, what, buckets, verbose=is_verbose()))

    def _choose_caps(self, group: dist.ProcessGroup) -> BucketCaps:
        """Return the caps that rank 0's measurements recommend. All ranks must call it."""
        cost = AllReduceCost.fit(collectives.time_all_reduces(PROBE_BYTES, group, self._device))
        if self._device_times is None:
            ready_ns = zip(self.arrivals.order, self.arrivals.ready_ns, strict=True)
            ready_s = {index: ns / 1e9 for index, ns in ready_ns}
        else:
            ready_s = self._device_times.seconds()
        choice = choose_caps(self.specs, ready_s, cost, self.options.caps)
        chosen = [choice.caps.first_bytes, choice.caps.cap_bytes]
        first_bytes, cap_bytes = collectives.broadcast_integers(chosen, 2, group, self._device)
        return BucketCaps(first_bytes, cap_bytes, measured=True)

    def _adopt(self, plan: BucketPlan) -> None:
        """Allocate buckets for `plan`; gradients that lived in the old ones move into the new."""
        self.buckets[:] = allocate(plan, self.members, self.options, self.buckets)
        self.state.replan(len(self.buckets))
        self.arrivals.regroup(plan.bucket_of(len(self.members)), len(self.buckets))
        self._early_moves.regroup(self.buckets)
