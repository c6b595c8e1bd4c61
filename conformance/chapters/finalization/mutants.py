"""Mutants of chapter finalization: DDPs with one bug each; `mutants.toml` names what detects it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.reducer.expectations import FindUnused
from ddp_impl.reducer.iteration import Event, Progress
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


@replaces(Reducer, "finalize_by_hand")
def ForgetsABucket(reducer: Reducer, finalize_by_hand: Call) -> None:
    """BUG: `finalize_backward` does not hand out the last bucket."""
    in_flight = reducer.reduction.iteration.in_flight
    if in_flight:
        reducer.reduction.wait(reducer.buckets[list(in_flight)[-1]])
    finalize_by_hand()


@replaces(Reducer, "all_have_sent", "finalize_by_hand")
def FinalizesAtOnce(reducer: Reducer, replaced: Call) -> None:
    """BUG: gradients are final when backward returns, even if the user is to finalize them."""
    if replaced.__name__ == "all_have_sent" and reducer.reduction.iteration.enter(Event.ALL_SENT):
        reducer.finalize()


@replaces(Reducer, "finalize_by_hand")
def FinalizesNothing(reducer: Reducer, finalize_by_hand: Call) -> None:
    """BUG: `finalize_backward` raises nothing where no backward has left it anything."""
    if reducer.reduction.iteration.progress is Progress.HELD:
        finalize_by_hand()


@replaces(Reducer, "check_finished")
def FinalizesInForward(reducer: Reducer, check_finished: Call) -> None:
    """BUG: a forward before `finalize_backward` finalizes, too."""
    if reducer.reduction.iteration.progress is Progress.HELD:
        reducer.finalize_by_hand()
    check_finished()


@replaces(Ours, "_pre_forward")
def RefusesEvaluation(ddp: Ours, pre_forward: Call, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a forward that brings no backward is refused before `finalize_backward`."""
    ddp.reducer.check_finished()
    return pre_forward(*inputs, **kwargs)


class SwitchesAtAnyTime(Ours):
    """BUG: who finalizes can be changed while a backward is expected or not final."""

    @property
    def require_manual_backward_finalization(self) -> bool:
        return self._options.finalizes_by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self._options = dataclasses.replace(self._options, finalizes_by_hand=required)
        self.reducer.reduction.options = self._options


@replaces(Reduction, "hide_gradients")
def LetsReplicasDrift(reduction: Reduction, hide_gradients: Call) -> None:
    """BUG: an optimizer may step on gradients that are not final."""


@replaces(Reduction, "hand_out_all_but_the_last")
def StepsBeforeTheUserSays(reduction: Reduction, hand_out_all_but_the_last: Call) -> None:
    """BUG: optimizers in backward step before `finalize_backward`."""
    options = reduction.options
    reduction.options = dataclasses.replace(options, finalizes_by_hand=False)
    hand_out_all_but_the_last()
    reduction.options = options


@replaces(Reduction, "collect")
def SendsFreshMemory(reduction: Reduction, collect: Call, bucket: Bucket) -> Tensor:
    """BUG: a bucket that is allocated lazily is zeroed when gradients are in it already."""
    buffer: Tensor = collect(bucket)
    return buffer.zero_() if reduction.options.lazy_bucket_allocation and bucket.views else buffer


class IgnoresLaziness(Ours):
    """BUG: `lazy_bucket_allocation` has no effect."""

    def attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._options = dataclasses.replace(self._options, lazy_bucket_allocation=False)
        super().attach_reducer(members)


@replaces(FindUnused, "exchange_usage")
def SearchesInSilence(expectation: Any, exchange_usage: Call) -> None:
    """BUG: no warning says that the search for unused parameters found none."""
    expectation.reduction.telemetry.warned.add("search")
    exchange_usage()
