"""What a reducer expects of a backward, by the option that its user chose: four classes, of which one is in use.

An expectation decides which buckets may leave within the backward, which parameters count as unused, and what ranks
exchange about them. The reducer calls it at four moments and looks at no option itself.

=============================  =============================  ==============================  ==========================
expectation                    a bucket leaves                unused is                       ranks exchange
=============================  =============================  ==============================  ==========================
`AllUsed` (no option)          when it is full                frozen, and without gradient    nothing
`Captured` (compiled autograd  when it is full                frozen, and not to be reached   nothing
runs the backward)
`FindUnused`                   when it is full, if the        what did not arrive             before the first gradient,
(`find_unused_parameters`)     forecast says that its                                         what is certain to arrive;
                               gradients arrive on every                                      behind the last bucket,
                               rank; else behind the backward                                 what was used
`StaticGraph`                  when it is full, if all ranks  what got no gradient in the     once, what the first
(`static_graph`)               use its parameters equally     first iteration                 iteration used
                               often; else behind the
                               backward
=============================  =============================  ==============================  ==========================

All buckets leave behind the backward in the first iteration, in which the reducer learns the order of gradients, and
from then on if ranks have found different orders (`company.Order`); with `FindUnused`, only the buckets that hold a
gradient which is out of order.
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


class AllUsed:
    """No option: every parameter gets a gradient in every backward, on every rank. The base of the other expectations.

    `allows_absence`: a parameter without a gradient counts as unused when the backward is over. `ranks_may_differ`:
    ranks may use different parameters, and exchange them before and after the gradients of an iteration. `is_static`:
    every iteration uses the same parameters.
    """

    allows_absence = False
    ranks_may_differ = False
    is_static = False

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.members, self.arrivals, self.graph = reduction.members, reduction.arrivals, reduction.graph

    def tie(self, output: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the `output` of a forward, which holds `tensors`; tied to the anchor if it used no parameter."""
        reduction = self.reduction
        if not self.allows_absence or reduction.num_ranks == 1 or self.graph.uses_any(tensors):
            return output
        is_frozen = all(map(reduction.is_frozen, range(len(self.members))))
        # torch.distributed.autograd captures gradients, and would show its users that of the anchor.
        if is_frozen or current_distributed_context_id() is not None:
            return output
        return reduction.anchor.tie(output, tensors)

    def iteration_begins(self) -> None:
        """Hold back the buckets that ranks are known to fill in different orders."""
        if not all(self.reduction.learnt.in_order):
            self.reduction.launch_all_after_backward()

    def learning_begins(self) -> None:
        """Hold all buckets back in a backward whose order the reducer still learns."""
        if not self.reduction.iteration.launched:
            self.reduction.launch_all_after_backward()

    def await_forecast(self) -> None:
        """Wait until this rank knows which buckets may leave within the backward."""

    def shadow_begins(self) -> None:
        """Take part, on a rank without data, in the exchange at the beginning of the other ranks' backward."""

    def announce(self) -> Sequence[int]:
        """Start the exchange at the beginning of a backward, if any; return the parameters that no rank will use."""
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

    def describe_unexpected(self, index: int) -> str:
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

    def exchange_usage(self) -> None:
        """Start to exchange which parameters ranks used: behind all gradients, so that it delays none."""

    def a_rank_refuses(self) -> bool:
        """Wait for the exchange at the end of this iteration, if any; return whether a rank cannot average."""
        if self.reduction.iteration.usage is None:
            return False
        with self.reduction.awaiting_usage():
            return self.reduction.read_usage()


class Captured(AllUsed):
    """No option, in a backward that compiled autograd runs: no callback at its end could find unused parameters."""

    def learning_begins(self) -> None:
        """Hold nothing back: compiled autograd does not report the end of this backward."""

    def announce(self) -> Sequence[int]:
        """Return the frozen parameters that the captured graph does not reach."""
        certain = enumerate(self.graph.certain_to_arrive())
        return [index for index, arrives in certain if not arrives and self.reduction.is_frozen(index)]


class FindUnused(AllUsed):
    """`find_unused_parameters`: parameters may lack a gradient, and ranks may differ in which."""

    allows_absence = True
    ranks_may_differ = True

    def announce(self) -> Sequence[int]:
        """Start to exchange which gradients are certain to arrive; no parameter counts as unused yet."""
        reduction = self.reduction
        if not reduction.iteration.has_forecast:
            certain = self.graph.certain_to_arrive()
            # Else it is torch.autograd.grad, perhaps on this rank alone.
            if not reduction.hooks.are_removed and (any(certain) or reduction.anchor.will_be_reached()):
                self.forecast(certain)
        return ()

    def forecast(self, certain: Sequence[bool]) -> None:
        """Start to exchange which gradients are `certain` to arrive; after several forwards none is."""
        reduction = self.reduction
        if reduction.iteration.num_forwards != 1:
            certain = [False] * len(certain)
        with reduction.order.counting_own_collectives(), reduction.awaiting_usage():
            reduction.iteration.forecast = self._round(certain)
        reduction.iteration.has_forecast = True

    def _round(self, certain: Sequence[bool] | None) -> Round:
        reduction = self.reduction
        return Round(
            reduction.group,
            reduction.device,
            counts=certain or [False] * len(self.members),
            contributes=certain is not None,
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
        """Wait for the forecast; start it now if the backward reached no output of forward."""
        iteration = self.reduction.iteration
        if not iteration.has_forecast:
            self.forecast(self.graph.certain_to_arrive())
        forecast, iteration.forecast = iteration.forecast, None
        if forecast is not None:
            self._read(forecast)

    def shadow_begins(self) -> None:
        """Read the other ranks' forecast without contributing to it."""
        self._read(self._round(None))

    def resolve_unused(self) -> list[int]:
        """Count as unused whatever did not arrive."""
        return self._resolve_all()

    def exchange_usage(self) -> None:
        """Exchange usage, and whether this rank refuses. Warn, once, where the search found nothing unused."""
        reduction = self.reduction
        if not (reduction.iteration.unused or "search" in reduction.telemetry.warned):
            reduction.telemetry.warn_once("search", messages.found_nothing_unused(reduction.rank))
        reduction.start_usage()


class StaticGraph(AllUsed):
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

    def announce(self) -> Sequence[int]:
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
        """Return False: an unused parameter of a static graph gets no later gradient."""
        return False

    def exchange_usage(self) -> None:
        """Exchange once how often ranks use each parameter, and then only where a parameter is unused everywhere."""
        promise = self.reduction.learnt.promise
        if promise is None and self.arrivals.num_to_learn_from:
            times = self.arrivals.learnt or [0] * len(self.members)
            self.reduction.start_usage(promised=[min(number, _MOST_TIMES) for number in times])
        elif promise is not None and not all(promise.used):
            self.reduction.start_usage(waits=True)

    def a_rank_refuses(self) -> bool:
        """Read the exchange; the first one is every rank's promise for all following iterations."""
        learns = self.reduction.learnt.promise is None
        refused = super().a_rank_refuses()
        answer = self.reduction.learnt.last_usage
        if learns and self.reduction.iteration.is_exchanged and answer is not None and answer.alike:
            used = [count > 0 for count in answer.counts[-len(self.members) :]]
            self.reduction.learnt.promise = Promise(used, answer.alike)
        return refused


def expectation_of(reduction: Reduction) -> AllUsed:
    """Return the expectation that the options of `reduction` ask for: the one place that chooses."""
    if reduction.options.static_graph:
        return StaticGraph(reduction)
    if reduction.options.find_unused_parameters:
        return FindUnused(reduction)
    return AllUsed(reduction)
