"""What a reducer expects of a backward, by the option that its user chose: four classes, of which one is in use.

An expectation decides which buckets may leave within the backward, what counts as unused, and what ranks exchange about
it. The reducer asks it at four moments and knows no option itself.

=============================  =============================  ==============================  ==========================
expectation                    a bucket leaves                unused is                       ranks exchange
=============================  =============================  ==============================  ==========================
`Every` (no option)            when it is full                frozen, and without gradient    nothing
`Captured` (compiled autograd  when it is full                frozen, and not to be reached   nothing
runs the backward)
`Some`                         when it is full, if the        what did not arrive             before the first gradient,
(`find_unused_parameters`)     forecast says that its                                         what is certain to arrive;
                               gradients arrive on every                                      behind the last bucket,
                               rank; else behind the backward                                 what was used
`Same` (`static_graph`)        when it is full, if all ranks  what got no gradient in the     once, what the first
                               use its parameters equally     first iteration                 iteration used
                               often; else behind the
                               backward
=============================  =============================  ==============================  ==========================

In the first iteration, whose order is learnt, all buckets leave behind the backward; so they do for good where ranks
have found different orders (`company.Order`); with `Some`, those of the gradients that are out of order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ddp_impl.base import messages
from ddp_impl.base.errors import ReductionError
from ddp_impl.reducer.iteration import Progress, Promise
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.torch_internals.autograd import current_distributed_context_id
from ddp_impl.torch_internals.distributed import DebugLevel, get_debug_level
from ddp_impl.wire.round import Answer, Round

#: More than once a parameter is rarely used; beyond this, how often is not compared.
_MOST_TIMES = 1000


class Every:
    """No option: every parameter gets a gradient in every backward, on every rank. The others derive from it.

    `allows_absence`: a parameter without a gradient counts as unused when the backward is over. `ranks_may_differ`: in
    what they use, so they exchange it before an iteration's gradients arrive and after. `is_static`: every iteration
    uses the same.
    """

    allows_absence = False
    ranks_may_differ = False
    is_static = False

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.members, self.arrivals, self.graph = reduction.members, reduction.arrivals, reduction.graph

    def tie(self, output: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the `output` of a forward, which holds `tensors`, tied if no parameter took part and none must."""
        reduction = self.reduction
        if not self.allows_absence or reduction.num_ranks == 1 or self.graph.uses_any(tensors):
            return output
        is_frozen = all(map(reduction.is_frozen, range(len(self.members))))
        # torch.distributed.autograd captures gradients, and would show its users that of the anchor.
        if is_frozen or current_distributed_context_id() is not None:
            return output
        return reduction.anchor.tie(output, tensors)

    def iteration_begins(self) -> None:
        """Hold back the buckets with gradients that do not arrive alike on every rank, as far as it is known by now."""
        if not all(self.reduction.learnt.in_order):
            self.reduction.launch_all_after_backward()

    def learning_begins(self) -> None:
        """Hold all buckets back, in a backward whose order is learnt: it is not known."""
        if not self.reduction.iteration.launched:
            self.reduction.launch_all_after_backward()

    def await_forecast(self) -> None:
        """Wait until it is known which buckets leave within the backward, if that is not known."""

    def shadow_begins(self) -> None:
        """Follow, on a rank without data, what the others exchange when their backward begins."""

    def absent_at_start(self) -> Sequence[int]:
        """Return the parameters of which all ranks know that this backward does not use them."""
        last = self.reduction.learnt.last_unused
        return [index for index in last if self.reduction.is_frozen(index)] if last else ()

    def resolve_unused(self) -> list[int]:
        """Take as unused what is frozen, and await the rest; return the buckets that are full. The backward is over."""
        frozen = [index for index in self.arrivals.missing if self.reduction.is_frozen(index)]
        self.reduction.iteration.unused.update(frozen)
        full = self.arrivals.exclude(frozen)
        self.arrivals.report_next()
        return full

    def _resolve_all(self) -> list[int]:
        iteration = self.reduction.iteration
        iteration.unused.update(self.arrivals.conclude())
        return [bucket for bucket in range(len(iteration.launch_order)) if bucket not in iteration.full]

    def may_still_arrive(self, index: int) -> bool:
        """Whether a parameter that counts as unused can still have its gradient in its bucket."""
        iteration, bucket = self.reduction.iteration, self.arrivals.bucket_of[index]
        return index in iteration.unused and bucket not in iteration.skipped and bucket not in iteration.launched

    def one_too_many(self, index: int) -> str:
        """Return the message for a gradient that arrived although none of its parameter was awaited."""
        reduction, name = self.reduction, self.members[index].name
        if index in reduction.iteration.unused:
            return messages.used_after_all(reduction.rank, name, static=self.is_static)
        return messages.ready_twice(reduction.rank, name, reduction.iteration.number, static=self.is_static)

    def unfinished(self) -> ReductionError:
        """Return the error for an iteration that is not finished; if gradients are missing, other ranks read it too."""
        reduction, peers = self.reduction, self.reduction.peers
        if reduction.iteration.progress is Progress.HELD:
            return reduction.error(messages.not_finalized(reduction.rank))
        if not reduction.iteration.is_incomplete:
            return reduction.error(messages.aborted(reduction.rank))
        missing = [(index, self.members[index].name) for index in self.arrivals.missing]
        if not missing:
            text = messages.reached_no_output(reduction.rank)
            return reduction.error(text + peers.exchange(messages.PASSED_BY))
        text = messages.unfinished(
            reduction.rank,
            missing,
            len(self.members),
            unused_allowed=reduction.options.find_unused_parameters,
            static=self.is_static,
            verbose=get_debug_level() != DebugLevel.OFF,
        )
        return reduction.error(text + peers.exchange(messages.lacks([name for _, name in missing], peers.step)))

    def ask(self) -> None:
        """Start exchanging which parameters ranks used: behind all gradients, so that it delays none."""

    def a_rank_refuses(self) -> bool:
        """Wait for what ranks exchange at the end of this iteration, if they do; return whether one cannot average."""
        if self.reduction.iteration.usage is None:
            return False
        with self.reduction.awaiting_usage():
            return self.reduction.read_usage()


class Captured(Every):
    """The same in a backward that compiled autograd runs: at its end it would be too late to find what is unused."""

    def learning_begins(self) -> None:
        """Hold nothing back: nobody reports when this backward ends."""

    def absent_at_start(self) -> Sequence[int]:
        """Return the frozen parameters that the captured graph does not reach."""
        coming = enumerate(self.graph.coming())
        return [index for index, comes in coming if not comes and self.reduction.is_frozen(index)]


class Some(Every):
    """`find_unused_parameters`: parameters may lack a gradient, and ranks may differ in which."""

    allows_absence = True
    ranks_may_differ = True

    def absent_at_start(self) -> Sequence[int]:
        """Take nothing for unused, but tell the other ranks what this backward is certain to bring."""
        reduction = self.reduction
        if not reduction.iteration.has_forecast:
            coming = self.graph.coming()
            # Else it is torch.autograd.grad, perhaps on this rank alone.
            if not reduction.hooks.are_removed and (any(coming) or reduction.anchor.is_coming()):
                self.forecast(coming)
        return ()

    def forecast(self, coming: Sequence[bool]) -> None:
        """Start the exchange of which gradients are certain to arrive; of several forwards none is."""
        reduction = self.reduction
        if reduction.iteration.num_forwards != 1:
            coming = [False] * len(coming)
        with reduction.order.counting_own_collectives(), reduction.awaiting_usage():
            reduction.iteration.forecast = self._round(coming)
        reduction.iteration.has_forecast = True

    def _round(self, coming: Sequence[bool] | None) -> Round:
        reduction = self.reduction
        return Round(
            reduction.group,
            reduction.device,
            counts=coming or [False] * len(self.members),
            tells=coming is not None,
        )

    def _read(self, forecast: Round) -> None:
        with self.reduction.awaiting_usage():
            answer = forecast.result()
        self.reduction.launch_uncertain_after_backward(self.certain_in_order(answer))

    def certain_in_order(self, forecast: Answer) -> Sequence[bool]:
        """Return for each parameter whether its gradient is certain to arrive, on all ranks in one order."""
        in_order = self.reduction.learnt.in_order or [False] * len(self.members)
        return list(map(min, forecast.certain, in_order))

    def await_forecast(self) -> None:
        """Wait for the forecast; make it now if no output of forward was reached."""
        iteration = self.reduction.iteration
        if not iteration.has_forecast:
            self.forecast(self.graph.coming())
        forecast, iteration.forecast = iteration.forecast, None
        if forecast is not None:
            self._read(forecast)

    def shadow_begins(self) -> None:
        """Agree with whatever the others forecast."""
        self._read(self._round(None))

    def resolve_unused(self) -> list[int]:
        """Count as unused whatever did not arrive."""
        return self._resolve_all()

    def ask(self) -> None:
        """Ask in every iteration, and tell whether this rank refuses. Warn, once, where the search was in vain."""
        reduction = self.reduction
        if not (reduction.iteration.unused or "search" in reduction.telemetry.warned):
            reduction.telemetry.warn_once("search", messages.found_nothing_unused(reduction.rank))
        reduction.start_usage()


class Same(Every):
    """`static_graph`: every iteration uses the same parameters as the first one, equally often."""

    allows_absence = True
    is_static = True

    def iteration_begins(self) -> None:
        """Hold back the buckets whose parameters ranks do not use equally often."""
        promise = self.reduction.learnt.promise
        if not all(self.reduction.learnt.in_order):
            self.reduction.launch_all_after_backward()
        elif promise is not None:
            self.reduction.launch_uncertain_after_backward(promise.alike)

    def absent_at_start(self) -> Sequence[int]:
        """Return what the first iteration did not use."""
        return self.arrivals.never_used

    def resolve_unused(self) -> list[int]:
        """Count as unused what did not arrive, when a backward ends that has reached an output of forward."""
        iteration = self.reduction.iteration
        if iteration.is_announced and not iteration.is_reached:
            self.arrivals.report_next()
            return []
        return self._resolve_all()

    def may_still_arrive(self, index: int) -> bool:
        """Return False: what a static graph counts as unused stays so."""
        return False

    def ask(self) -> None:
        """Ask once what ranks use and how often, and afterwards only for what none of them uses."""
        promise = self.reduction.learnt.promise
        if promise is None and self.arrivals.num_to_learn_from:
            times = self.arrivals.learnt or [0] * len(self.members)
            self.reduction.start_usage(promised=[min(number, _MOST_TIMES) for number in times])
        elif promise is not None and not all(promise.used):
            self.reduction.start_usage(waits=True)

    def a_rank_refuses(self) -> bool:
        """Read the answer, and from the first one what every rank promises of the following iterations."""
        learns = self.reduction.learnt.promise is None
        refused = super().a_rank_refuses()
        answer = self.reduction.learnt.last_usage
        if learns and self.reduction.iteration.is_exchanged and answer is not None and answer.alike:
            used = [count > 0 for count in answer.counts[-len(self.members) :]]
            self.reduction.learnt.promise = Promise(used, answer.alike)
        return refused


def expectation_of(reduction: Reduction) -> Every:
    """Return the expectation that the options of `reduction` ask for: the one place that chooses."""
    if reduction.options.static_graph:
        return Same(reduction)
    if reduction.options.find_unused_parameters:
        return Some(reduction)
    return Every(reduction)
