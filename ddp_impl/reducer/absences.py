"""`Absences`: gradients that do not come, and parameters that the reducer takes for unused because of that."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ddp_impl.autograd.anchor import Anchor
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.base import messages
from ddp_impl.base.errors import ReductionError
from ddp_impl.reducer.iteration import Backward
from ddp_impl.reducer.reducer_parts import ReducerParts
from ddp_impl.reducer.reducer_state import BucketPhase, Phase
from ddp_impl.reducer.reduction import BucketReduction
from ddp_impl.torch_internals.autograd import current_distributed_context_id
from ddp_impl.torch_internals.distributed import DebugLevel, get_debug_level
from ddp_impl.wire.groups import size_of


class Absences:
    """Decides which parameters an iteration does not use: before its gradients come, and when the backward is over.

    The parameters end up in `ParameterUsage.unused`, and their buckets await nothing more of them. A forward that uses
    none of the parameters is tied to `anchor`.
    """

    def __init__(self, parts: ReducerParts, reduction: BucketReduction, hooks: AutogradHooks, anchor: Anchor) -> None:
        """Take no parameter for unused."""
        self._parts = parts
        self._members = parts.members
        self._state = parts.state
        self._arrivals = parts.arrivals
        self._search = parts.search
        self._usage = parts.usage
        self._reduction = reduction
        self._hooks = hooks
        self._anchor = anchor
        self._has_warned = False

    @property
    def are_allowed(self) -> bool:
        """Whether a parameter without a gradient counts as unused when the backward is over."""
        options = self._reduction.options
        return options.find_unused_parameters or options.static_graph

    def tie(self, output: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the `output` of a synchronised forward, which holds `tensors`; tied if no parameter took part in it.

        So a rank takes part in a backward in which others use parameters and it does not, where that is allowed. With
        every parameter frozen (a discriminator, while its generator trains) a forward is not part of the training.
        """
        is_alone = size_of(self._reduction.group) == 1
        if is_alone or not self.are_allowed or self._search.uses_any(tensors):
            return output
        is_frozen = all(map(self._reduction.is_frozen, range(len(self._members))))
        # torch.distributed.autograd captures gradients, and would show its users that of the anchor.
        if is_frozen or current_distributed_context_id() is not None:
            return output
        return self._anchor.tie(output, tensors)

    def when_backward_begins(self, backward: Backward) -> list[int]:
        """Take as unused what all ranks know that it is; tell them what this backward is sure to bring, if they ask.

        Return the buckets that are full now.
        """
        absent: list[int] = []
        options, is_frozen = self._reduction.options, self._reduction.is_frozen
        if options.static_graph:
            absent = self._arrivals.never_used
        elif backward.is_compiled:  # at its end it would be too late to find them
            absent = [index for index, comes in enumerate(self._search.coming()) if not comes and is_frozen(index)]
        elif not options.find_unused_parameters:
            absent = [index for index in self._usage.last_unused or () if is_frozen(index)]
        elif not self._reduction.iteration.has_forecast:
            coming = self._search.coming()
            if self._hooks.are_removed or not (any(coming) or self._anchor.is_coming()):
                return []  # torch.autograd.grad, perhaps on this rank alone
            self._reduction.tell_others(coming)
        self._usage.unused.update(absent)
        return self._arrivals.exclude(absent)

    def when_backward_is_over(self) -> list[int]:
        """Take as unused what has not come, or leave it to another backward; return the buckets that are full now.

        A static graph may have several backwards in an iteration. One that has come to no output of forward, such as
        that of a loss which the module keeps, leaves what has not come to the one that will.
        """
        iteration = self._reduction.iteration
        if self._reduction.options.static_graph and iteration.is_announced and not iteration.is_reached:
            self._arrivals.report_next()
            return []
        if self.are_allowed:
            self._usage.unused.update(self._arrivals.conclude())
            return [index for index, phase in enumerate(self._state.buckets) if phase is BucketPhase.FILLING]
        frozen = [index for index in self._arrivals.missing if self._reduction.is_frozen(index)]
        self._usage.unused.update(frozen)
        full = self._arrivals.exclude(frozen)
        self._arrivals.report_next()
        return full

    def came_late(self, index: int) -> None:
        """Leave a gradient local that came after the iteration; say so, once, if that counted it as unused."""
        self._usage.used_locally.add(index)
        if self._has_warned or index not in (self._usage.last_unused or ()) or self._state.phase is not Phase.IDLE:
            return
        if not self._usage.follows_local and index not in self._hooks.shared():  # else it was expected
            self._has_warned = True
            name, iteration = self._members[index].name, self._state.num_iterations
            warnings.warn(messages.came_late(self._state.rank, name, iteration), stacklevel=2)

    def may_still_come(self, index: int) -> bool:
        """Whether a parameter that was taken for unused can still have its gradient in its bucket."""
        bucket = self._arrivals.bucket_of[index]
        return (
            index in self._usage.unused
            and not self._reduction.options.static_graph
            and bucket not in self._reduction.iteration.skipped
            and self._state.buckets[bucket] is not BucketPhase.LAUNCHED
        )

    def one_too_many(self, index: int) -> ReductionError:
        """Return the error for a gradient that came although none of its parameter was awaited."""
        rank, name, static = self._state.rank, self._members[index].name, self._reduction.options.static_graph
        if index in self._usage.unused:
            return self._parts.error(messages.used_after_all(rank, name, static=static))
        return self._parts.error(messages.ready_twice(rank, name, self._state.num_iterations, static=static))

    def some_missing(self) -> ReductionError:
        """Return the error for a backward that is over and has left gradients out; other ranks read it in theirs."""
        missing = [(index, self._members[index].name) for index in self._arrivals.missing]
        options, peers = self._reduction.options, self._reduction.peers
        return self._parts.error(
            messages.unfinished(
                self._state.rank,
                missing,
                len(self._members),
                unused_allowed=options.find_unused_parameters,
                static=options.static_graph,
                verbose=get_debug_level() != DebugLevel.OFF,
            )
            + peers.exchange(messages.lacks([name for _, name in missing], peers.step))
        )
