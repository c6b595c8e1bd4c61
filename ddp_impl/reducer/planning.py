"""Plans buckets and allocates them: without a guess at first, later by rank 0's order of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from ddp_impl.base import messages
from ddp_impl.base.options import BucketCaps
from ddp_impl.base.telemetry import Observer, is_verbose, milestone
from ddp_impl.buckets.bucket import allocate
from ddp_impl.buckets.gradients import EarlyMoves
from ddp_impl.buckets.plan import (
    NUM_PROFILED,
    PROBE_BYTES,
    AllReduceCost,
    BucketPlan,
    choose_caps,
    plan_for_order,
    plan_for_unknown_order,
)
from ddp_impl.reducer.iteration import Progress
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.wire import collectives
from ddp_impl.wire.round import Round


class BucketPlanning:
    """Fills the buckets of `reduction`; gradients that are large move into those that `early_moves` is given."""

    def __init__(self, reduction: Reduction, early_moves: EarlyMoves) -> None:
        self.reduction, self._early_moves = reduction, early_moves
        self.specs = [member.spec(reduction.options) for member in reduction.members]
        devices = {member.parameter.device for member in reduction.members}
        times = reduction.device.type != "cpu" and len(devices) == 1 and reduction.options.caps.measured
        #: When gradients arrive on the device; None where the host's clock says it.
        self.device_times = DeviceTimes(reduction.device) if times else None
        self.begin_to_learn()

    def begin_to_learn(self) -> None:
        """Start from buckets that guess nothing, with nothing learnt."""
        options = self.reduction.options
        # A static graph is learnt in its first iteration; the next one counts on it.
        measures = options.caps.measured and not options.static_graph
        self.reduction.arrivals.forget(NUM_PROFILED if measures else 1)
        self.adopt(plan_for_unknown_order(self.specs))

    def exchange_order(self, *, is_over: bool) -> None:
        """Send rank 0's order of gradients, and where each arrived here, after the last iteration to learn from.

        Called when all of a backward has been sent, and again when it `is_over`: behind all that has been sent and
        before anything is waited for, as one rank may run in one backward what another runs in several. Not in the next
        forward: ranks may run forwards of several wrappers in different orders, or wait in between, as stages of a
        pipeline do.
        """
        reduction, learnt, arrivals = self.reduction, self.reduction.learnt, self.reduction.arrivals
        if learnt.has_rebuilt_buckets or learnt.order_exchange is not None or learnt.order:
            return
        progress, hook = reduction.iteration.progress, reduction.comm_hook
        has_sent = progress is Progress.SENT
        if arrivals.num_to_learn_from > has_sent or not (has_sent or progress is Progress.IDLE):
            return
        if not is_over and hook is not None and hook.group() is None:
            return  # it may communicate when its future is done
        arrived, may_differ = reduction.iteration.arrived, reduction.ranks_may_differ
        num_members, told = len(reduction.members), [reduction.peers.number, *arrivals.order]
        if may_differ:  # what arrives at other wrappers does not matter: they wait for this one (`may_send`)
            arrived = {index: (collectives, 0) for index, (collectives, _) in arrived.items()}
        places = [arrived.get(index) for index in range(num_members)]
        with reduction.peers.awaiting("backward", self._awaited), reduction.order.counting_own_collectives():
            learnt.order_exchange = Round(
                reduction.group, reduction.device,
                of_rank_0=[*told, *[-1] * (1 + num_members - len(told))], alike=encoded(places),
                contributes=may_differ or bool(arrived), waits=False,
            )  # fmt: skip

    def await_order(self) -> None:
        """Wait for what ranks exchange about their orders, if that is on its way; note whether they differ."""
        learnt, exchange = self.reduction.learnt, self.reduction.learnt.order_exchange
        learnt.order_exchange = None
        if exchange is not None:
            with self.reduction.peers.awaiting("backward", self._awaited):
                answer = exchange.result()
            learnt.order = [number for number in answer.of_rank_0 if number >= 0]
            learnt.in_order = list(map(all, zip(answer.alike[::2], answer.alike[1::2], strict=True)))

    def agree_on_order(self, mine: Sequence[int] | None) -> Sequence[int] | None:
        """Return rank 0's order of gradients, by which buckets are planned from now on; None if a rank has none.

        `mine`: the order of this rank's compiled backward. All ranks must call it in one forward.
        """
        reduction, learnt = self.reduction, self.reduction.learnt
        told = [0] * len(self.specs) if mine is None else mine
        if learnt.has_rebuilt_buckets:
            told = [member.index for bucket in reduction.buckets for member in bucket.members]
        with reduction.peers.awaiting("forward", "whether the other ranks capture the module as one graph"):
            answer = Round(reduction.group, reduction.device, counts=[mine is not None], of_rank_0=told).result()
        if answer.counts[0] < answer.num_ranks:
            return None
        rebuilds = not (learnt.has_rebuilt_buckets or reduction.options.caps.measured)
        if rebuilds and reduction.iteration.progress is Progress.IDLE:
            learnt.order = [reduction.peers.number, *answer.of_rank_0]
            self.rebuild()
        return answer.of_rank_0

    def _awaited(self) -> str:
        return messages.order([member.name for member in self.reduction.members])

    def rebuild(self) -> None:
        """Plan buckets anew by rank 0's order; raises `ReductionError` if that is of another wrapper."""
        reduction, learnt = self.reduction, self.reduction.learnt
        number, *order = learnt.order
        if number != reduction.peers.number:
            text = messages.another_wrapper(reduction.rank, reduction.peers.number, number)
            reduction.peers.publish(text)
            raise reduction.error(text)
        if reduction.options.caps.measured:
            with reduction.peers.awaiting("forward", "the times of the ranks' all-reduces"):
                learnt.caps = self.choose_caps()
        self.adopt(plan_for_order(self.specs, order, learnt.caps))
        learnt.order = []
        learnt.has_rebuilt_buckets = True
        self.log_plan(f"has rebuilt its buckets after {reduction.telemetry.num_iterations} iterations")

    def log_plan(self, what: str) -> None:
        """Log `what` happened, and the buckets as they are now."""
        buckets = [(bucket.num_bytes, [member.name for member in bucket.members]) for bucket in self.reduction.buckets]
        milestone(messages.planned(self.reduction.rank, what, buckets, verbose=is_verbose()))

    def choose_caps(self) -> BucketCaps:
        """Return the caps that rank 0's measurements recommend. All ranks must call it."""
        reduction, arrivals = self.reduction, self.reduction.arrivals
        cost = AllReduceCost.fit(collectives.time_all_reduces(PROBE_BYTES, reduction.group, reduction.device))
        if self.device_times is None:
            ready_ns = zip(arrivals.order, arrivals.ready_ns, strict=True)
            ready_s = {index: ns / 1e9 for index, ns in ready_ns}
        else:
            ready_s = self.device_times.seconds()
        mine = choose_caps(self.specs, ready_s, cost, reduction.options.caps)
        chosen = [mine.first_bytes, mine.cap_bytes]
        answer = Round(reduction.group, reduction.device, of_rank_0=chosen, waits=False).result()
        first_bytes, cap_bytes = answer.of_rank_0
        return BucketCaps(first_bytes, cap_bytes, measured=True)

    def adopt(self, plan: BucketPlan) -> None:
        """Allocate buckets for `plan`; gradients that lived in the old ones move into the new."""
        reduction = self.reduction
        reduction.buckets[:] = allocate(plan, reduction.members, reduction.options, reduction.buckets)
        reduction.arrivals.regroup(plan.bucket_of(len(reduction.members)), len(reduction.buckets))
        reduction.forget_iteration()
        self._early_moves.regroup(reduction.buckets)


def encoded(places: Sequence[tuple[int, int] | None]) -> list[int]:
    """Return two bytes for each place, which differ, almost surely, where places do; zeros for None."""
    nowhere = bytes(2)
    return list(b"".join(nowhere if place is None else crc32(b"%d %d" % place).to_bytes(4)[2:] for place in places))


class DeviceTimes(Observer):
    """Notes when gradients arrive on `device`; the host's clock would tell when work was launched, long before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begin = device, torch.Event(device, enable_timing=True)
        self._at: dict[int, torch.Event] = {}

    def backward_begins(self, *, is_first: bool) -> None:
        """Forget what was noted; times count from here."""
        if is_first:
            self._at.clear()
            self._begin = self._now()

    def gradient_arrived(self, index: int) -> None:
        """Note when the first gradient of a parameter has arrived."""
        if index not in self._at:
            self._at[index] = self._now()

    def seconds(self) -> dict[int, float]:
        """Return for each parameter how long after the beginning that was; makes the host wait for the last one."""
        for event in self._at.values():
            event.synchronize()
        return {index: self._begin.elapsed_time(event) / 1000 for index, event in self._at.items()}

    def _now(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
