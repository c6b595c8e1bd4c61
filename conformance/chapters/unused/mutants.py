"""Mutants of chapter unused: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from ddp_impl.reducer.absences import Absences
from ddp_impl.reducer.parameter_usage import ParameterUsage
from ddp_impl.reducer.reducer_state import Event
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from conformance.mutants.bases import ActsAfterBackward
from conformance.mutants.patches import Call, replaces
from ddp_impl.base.errors import ReductionError
from ddp_impl.buckets.bucket import Bucket
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


@replaces(ActsAfterBackward, "after_reduced")
def ZeroesUnusedGradients(ddp: ActsAfterBackward, after_reduced: Call) -> None:
    """BUG: a parameter that no rank used ends the backward with a gradient of zeros, where it had none."""
    for parameter in ddp.module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class _Excluding(Reducer):
    """Takes for unused, before the backward brings anything, what it does not believe to come."""

    believed: Sequence[bool] = ()

    def announce(self) -> None:
        super().announce()
        self.absences.may_still_come = lambda index: False  # type: ignore[method-assign]
        if self.reduction.options.find_unused_parameters and any(self.believed):
            absent = [index for index, comes in enumerate(self.believed) if not comes]
            self.usage.unused.update(absent)
            for bucket in self.arrivals.exclude(absent):
                self._bucket_full(bucket)


@replaces(_Excluding, "prepare_for_backward")
def LastForwardCounts(reducer: _Excluding, prepare_for_backward: Call, outputs: Any) -> None:
    """BUG: of several forwards before one backward only the last one's parameters count as used."""
    tensors = list(outputs)
    reducer.believed = _reachable(tensors, reducer.search.nodes)
    prepare_for_backward(tensors)


@replaces(Reduction, "launch")
def RefusesUnusedSparse(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: a sparse gradient that does not come is an error."""
    if bucket.sparse and bucket.parameters[0].grad is None:
        raise RuntimeError("a sparse gradient is missing")
    launch(bucket)


@replaces(Reduction, "used_by_now")
def LeavesOneOut(reduction: Reduction, used_by_now: Call, bucket: Bucket, buffer: Tensor) -> list[bool] | None:
    """BUG: off by one, with `find_unused_parameters` the last parameter counts as unused."""
    used = used_by_now(bucket, buffer)
    return None if used is None or not reduction.options.find_unused_parameters else [*used[:-1], False]


@replaces(Reducer, "check_finished")
def NamesNoParameters(reducer: Reducer, check_finished: Call) -> None:
    """BUG: the error about missing gradients does not say which parameters they are of."""
    try:
        check_finished()
    except ReductionError as error:
        raise ReductionError("the previous reduction did not finish") from error


@replaces(ParameterUsage, "end_agreeing")
def AsksNobody(usage: ParameterUsage, end_agreeing: Call) -> None:
    """BUG: ranks do not ask each other which parameters were used."""
    own = usage._used(usage.used_locally)
    end_agreeing()
    usage.anywhere = own


@replaces(ParameterUsage, "end_agreeing")
def UsedOnceIsUsed(usage: ParameterUsage, end_agreeing: Call) -> None:
    """BUG: a parameter that was used in some step counts as used in all later ones."""
    before = usage.anywhere
    end_agreeing()
    if before is not None and usage.anywhere is not None:
        usage.anywhere = [new or old for new, old in zip(usage.anywhere, before, strict=True)]


@replaces(Reduction, "used_by_now")
def ZeroesForUnused(reduction: Reduction, used_by_now: Call, bucket: Bucket, buffer: Tensor) -> list[bool] | None:
    """BUG: parameters that no rank used get zeros, which optimizers take for gradients."""
    return None


@replaces(Absences, "are_allowed")
def SearchesBeforeBackwardOnly(absences: Absences, are_allowed: Call) -> bool:
    """BUG: parameters whose output the loss leaves out are waited for in vain."""
    return False


@replaces(Reduction, "release_late")
def NeverSkips(reduction: Reduction, agree_on_skipped: Call) -> None:
    """BUG: `skip_all_reduce_unused_params` saves nothing."""


@replaces(Reducer, "check_finished")
def ForgivesMissingGradients(reducer: Reducer, check_finished: Call) -> None:
    """BUG: gradients that never came are not noticed; the next iteration begins as if nothing had happened."""
    if reducer.state.is_unfinished:
        reducer.state.handle(Event.RESET)
        reducer.reduction.iteration.in_flight.clear()
        reducer.arrivals.disarm()


@replaces(_Excluding, "prepare_for_backward")
def FirstOutputOnly(reducer: _Excluding, prepare_for_backward: Call, outputs: Iterable[Tensor]) -> None:
    """BUG: backward is noticed through the first tensor of the output only."""
    first = list(outputs)[:1]
    reducer.believed = _reachable(first, reducer.search.nodes)
    prepare_for_backward(first)
    reducer.reduction.iteration.is_announced = False


class UnusedHereStaysNone(ActsAfterBackward):
    """BUG: a rank that did not use a parameter gets no gradient for it, although others did."""

    def before_reduced(self) -> None:
        self._absent = [parameter for parameter in self.module.parameters() if parameter.grad is None]

    def after_reduced(self) -> None:
        for parameter in self._absent:
            parameter.grad = None


@replaces(Reducer, "announce")
def CountsEarlyGradientsAgain(reducer: Reducer, expect: Call) -> None:
    """BUG: a gradient that came before autograd reached an output of forward counts once more, as an unused one."""
    for index, left in enumerate(reducer.arrivals.due):
        if not left and reducer.reduction.options.find_unused_parameters:
            reducer.arrivals.pending[reducer.arrivals.bucket_of[index]] -= 1
    expect()


@replaces(Absences, "tie")
def ForgetsIdleRanks(absences: Absences, tie: Call, output: Any, tensors: Sequence[Tensor]) -> Any:
    """BUG: a rank whose forward used no parameter takes no part in the reduction; others meet its next one."""
    return output


@replaces(_Excluding, "announce")
def BelievesItsSearch(reducer: _Excluding, expect: Call) -> None:
    """BUG: what the search did not find counts as unused, also behind functions that hide their graph."""
    reducer.believed = reducer.search.coming()
    expect()


def _reachable(outputs: Iterable[Tensor], nodes: Sequence[Node]) -> list[bool]:
    """Return which of these nodes a backward from `outputs` comes to."""
    stack = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    seen = set[Node](stack)
    while stack:
        following = {node for node, _ in stack.pop().next_functions if node is not None} - seen
        seen |= following
        stack += following
    return [node in seen for node in nodes]


@replaces(ParameterWatch, "check")
def RefusesLosses(watch: ParameterWatch, check: Call, /, *, may_lose: bool = False) -> None:
    """BUG: a module that has lost a parameter is refused where parameters may be unused, too."""
    check()


@replaces(Absences, "came_late")
def SaysNothingOfLateGradients(absences: Absences, came_late: Call, index: int) -> None:
    """BUG: a gradient that comes after its parameter counted as unused stays local, without a word."""
    absences._usage.used_locally.add(index)
