"""Mutants of chapter unused: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from conformance.mutants.bases import ActsAfterBackward
from conformance.mutants.patches import Call, replaces
from ddp_impl.autograd.marks import Anchor
from ddp_impl.base import messages
from ddp_impl.base.errors import ReductionError
from ddp_impl.base.nested_tensors import map_tensors
from ddp_impl.buckets.bucket import Bucket
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.reducer.expectations import AllUsed, FindUnused
from ddp_impl.reducer.iteration import Event, Progress
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


@replaces(ActsAfterBackward, "after_reduced")
def ZeroesUnusedGradients(ddp: ActsAfterBackward, after_reduced: Call) -> None:
    """BUG: a parameter that no rank used ends the backward with a gradient of zeros, where it had none."""
    for parameter in ddp.module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class _Excluding(Reducer):
    """Takes for unused, before the backward brings anything, what it does not expect to arrive."""

    believed: Sequence[bool] = ()

    def announce(self) -> None:
        super().announce()
        self.expectation.may_still_arrive = lambda index: False  # type: ignore[method-assign]
        if self.reduction.options.find_unused_parameters and any(self.believed):
            absent = [index for index, arrives in enumerate(self.believed) if not arrives]
            self.reduction.iteration.unused.update(absent)
            for bucket in self.arrivals.exclude(absent):
                self.bucket_is_full(bucket)


@replaces(_Excluding, "prepare_for_backward")
def LastForwardCounts(reducer: _Excluding, prepare_for_backward: Call, outputs: Any) -> None:
    """BUG: of several forwards before one backward only the last one's parameters count as used."""
    tensors = list(outputs)
    reducer.believed = _reachable(tensors, reducer.reduction.graph.nodes)
    prepare_for_backward(tensors)


@replaces(Reduction, "launch")
def RefusesUnusedSparse(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: a sparse gradient that does not arrive is an error."""
    if bucket.sparse and bucket.parameters[0].grad is None:
        raise RuntimeError("a sparse gradient is missing")
    launch(bucket)


@replaces(Reduction, "hand_out")
def LeavesOneOut(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: off by one, with `find_unused_parameters` the last parameter counts as unused."""
    leaves_out = reduction.options.find_unused_parameters and used is not None
    hand_out(bucket, buffer, [*used[:-1], False] if leaves_out else used)


@replaces(Reducer, "check_finished")
def NamesNoParameters(reducer: Reducer, check_finished: Call) -> None:
    """BUG: the error about missing gradients does not say which parameters they are of."""
    try:
        check_finished()
    except ReductionError as error:
        raise ReductionError("the previous reduction did not finish") from error


@replaces(Reduction, "read_usage")
def AsksNobody(reduction: Reduction, read_usage: Call) -> Any:
    """BUG: ranks do not ask each other which parameters were used."""
    refused = read_usage()
    reduction.iteration.used_anywhere = reduction.used(reduction.used_locally)
    return refused


@replaces(Reduction, "read_usage")
def UsedOnceIsUsed(reduction: Reduction, read_usage: Call) -> Any:
    """BUG: a parameter that was used in some step counts as used in all later ones."""
    refused, now = read_usage(), reduction.iteration
    if now.used_anywhere is not None:
        ever = vars(reduction).setdefault("ever", [False] * len(now.used_anywhere))
        ever[:] = [new or old for new, old in zip(now.used_anywhere, ever, strict=True)]
        now.used_anywhere = list(ever)
    return refused


@replaces(Reduction, "finalize_buckets")
def ZeroesForUnused(reduction: Reduction, finalize_buckets: Call) -> None:
    """BUG: parameters that no rank used get zeros, which optimizers take for gradients."""
    reduction.iteration.used_anywhere, reduction.iteration.is_exchanged = None, True
    finalize_buckets()


@replaces(FindUnused, "resolve_unused")
def SearchesBeforeBackwardOnly(expectation: FindUnused, resolve_unused: Call) -> list[int]:
    """BUG: parameters whose output the loss leaves out are waited for in vain."""
    return AllUsed.resolve_unused(expectation)


@replaces(Reduction, "release_late")
def NeverSkips(reduction: Reduction, release_late: Call) -> None:
    """BUG: `skip_all_reduce_unused_params` saves nothing."""
    reduction.iteration.num_late = 0


@replaces(Reducer, "check_finished")
def ForgivesMissingGradients(reducer: Reducer, check_finished: Call) -> None:
    """BUG: gradients that never arrived are not noticed; the next iteration begins as if nothing had happened."""
    iteration = reducer.reduction.iteration
    if iteration.progress not in (Progress.IDLE, Progress.AWAITS):
        iteration.enter(Event.RESET)
        iteration.in_flight.clear()
        reducer.arrivals.disarm()


@replaces(_Excluding, "prepare_for_backward")
def FirstOutputOnly(reducer: _Excluding, prepare_for_backward: Call, outputs: Iterable[Tensor]) -> None:
    """BUG: backward is noticed through the first tensor of the output only."""
    first = list(outputs)[:1]
    reducer.believed = _reachable(first, reducer.reduction.graph.nodes)
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
def CountsEarlyGradientsAgain(reducer: Reducer, announce: Call) -> None:
    """BUG: a gradient that arrived before autograd reached an output of forward counts once more, as an unused one."""
    for index, left in enumerate(reducer.arrivals.due):
        if not left and reducer.reduction.options.find_unused_parameters:
            reducer.arrivals.pending[reducer.arrivals.bucket_of[index]] -= 1
    announce()


@replaces(FindUnused, "tie")
def ForgetsIdleRanks(expectation: FindUnused, tie: Call, output: Any, tensors: Sequence[Tensor]) -> Any:
    """BUG: a rank whose forward used no parameter takes no part in the reduction; others meet its next one."""
    return output


@replaces(_Excluding, "announce")
def BelievesItsSearch(reducer: _Excluding, announce: Call) -> None:
    """BUG: what the search did not find counts as unused, also behind functions that hide their graph."""
    reducer.believed = reducer.reduction.graph.certain_to_arrive()
    announce()


def _reachable(outputs: Iterable[Tensor], nodes: Sequence[Node]) -> list[bool]:
    stack = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    seen = set[Node](stack)
    while stack:
        following = {node for node, _ in stack.pop().next_functions if node is not None} - seen
        seen |= following
        stack += following
    return [node in seen for node in nodes]


@replaces(ParameterWatch, "check")
def RefusesLosses(watch: ParameterWatch, check: Call, /, *, allow_removed: bool = False) -> None:
    """BUG: a module that has lost a parameter is refused where parameters may be unused, too."""
    check()


@replaces(Reducer, "take_gradient")
def SaysNothingOfLateGradients(reducer: Reducer, take_gradient: Call, index: int) -> None:
    """BUG: a gradient that arrives after its parameter counted as unused stays local, without a warning."""
    with mock.patch("ddp_impl.reducer.reducer.warnings.warn"):
        take_gradient(index)


@replaces(Anchor, "tie")
def TiesRealOutputs(anchor: Anchor, tie: Call, output: Any, tensors: Sequence[Tensor]) -> Any:
    """BUG: a complex output of a forward that used no parameter asks for no gradient."""
    return tie(output, [tensor for tensor in tensors if tensor.is_floating_point()])


@replaces(Anchor, "tie")
def AddsZeroToIdleOutputs(anchor: Anchor, tie: Call, output: Any, tensors: Sequence[Tensor]) -> Any:
    """BUG: a zero is added to what a forward without parameters returns, so that -0.0 becomes 0.0."""
    sums = {id(one): one + torch.zeros_like(one) for one in tensors}
    return tie(map_tensors(lambda one: sums.get(id(one), one), output), list(sums.values()))


@replaces(FindUnused, "tie")
def LosesIntegersOfIdleRanks(expectation: FindUnused, tie: Call, output: Any, tensors: Sequence[Tensor]) -> Any:
    """BUG: where forward used no parameter, outputs that can have no gradient are lost."""
    tied = tie(output, tensors)
    is_idle = tied is not output
    lost: Any = None
    return map_tensors(lambda one: lost if is_idle and not one.is_floating_point() else one, tied)


@replaces(FindUnused, "announce")
def WarnsBeforeItHasSearched(expectation: FindUnused, announce: Call) -> Sequence[int]:
    """BUG: when a backward begins, it warns that the search for unused parameters found none."""
    reduction = expectation.reduction
    reduction.telemetry.warn_once("search", messages.found_nothing_unused(reduction.rank))
    unused: Sequence[int] = announce()
    return unused
