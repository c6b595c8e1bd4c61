"""Mutants of chapter neighbours: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api import distributed
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.module import replicas
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.reducer import iteration
from ddp_impl.reducer.company import Order, company
from ddp_impl.reducer.expectations import FindUnused
from ddp_impl.reducer.iteration import Progress, Run
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction, step_parameters
from ddp_impl.wire.round import Answer


@as_part
class LeavesWithItsLastGradient(FindUnused):
    """BUG: a bucket leaves with the last gradient that this rank uses, whatever other ranks use."""

    def announce(self) -> Sequence[int]:
        super().announce()
        return _uncertain(self)

    def may_still_arrive(self, index: int) -> bool:
        return False

    def await_forecast(self) -> None:
        with mock.patch.object(self.reduction, "launch_uncertain_after_backward"):
            super().await_forecast()


def _uncertain(expectation: FindUnused) -> list[int]:
    return [index for index, arrives in enumerate(expectation.graph.certain_to_arrive()) if not arrives]


@replaces(FindUnused, "announce")
def TellsWithItsFirstBucket(expectation: FindUnused, announce: Call) -> Sequence[int]:
    """BUG: ranks exchange which gradients will arrive when their first bucket is full, and not when backward begins."""
    return ()


@as_part
class FullOnesEndFirst(Reducer):
    """BUG: wrappers that miss no gradient end before those that do, whatever the order of their construction."""

    @property
    def construction(self) -> Any:  # type: ignore[override]
        return bool(self.arrivals.missing), self.__dict__["construction"]


class AllAreLocalTogether(Ours):
    """BUG: `no_sync` of one wrapper is that of all wrappers of the process."""

    _all: weakref.WeakSet[AllAreLocalTogether] = weakref.WeakSet()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all.add(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as local:
            for wrapper in list(self._all):
                local.enter_context(super(AllAreLocalTogether, wrapper).no_sync())
            yield


@replaces(Reducer, "begins_with_others")
def BeginsAloneAfterOthers(reducer: Reducer, begins_with_others: Call, repeated: int | None) -> bool:
    """BUG: after `torch.autograd.grad`, or an early gradient, a wrapper announces its forecast at its own output."""
    now = reducer.reduction.iteration
    return now.progress is Progress.AWAITS and now.run is Run.NONE and begins_with_others(repeated)


@replaces(Reducer, "begins_with_others")
def BeginsAloneWhereItIsIdle(reducer: Reducer, begins_with_others: Call, repeated: int | None) -> bool:
    """BUG: where a rank uses no parameter of a wrapper, that one's backward begins at its own output."""
    return any(reducer.reduction.graph.certain_to_arrive()) and begins_with_others(repeated)


@replaces(FindUnused, "announce")
def AwaitsForecastsAtOnce(expectation: FindUnused, announce: Call) -> Sequence[int]:
    """BUG: a wrapper waits for the ranks' forecasts when the backward begins, and so do wrappers of other groups."""
    absent: Sequence[int] = announce()
    if expectation.reduction.iteration.has_forecast:
        expectation.await_forecast()
    return absent


@replaces(Reducer, "has_more_to_send")
def SendsAsGradientsCome(reducer: Reducer, has_more_to_send: Call) -> bool:
    """BUG: of two wrappers that one sends first whose gradients arrive first on this rank."""
    return False


@replaces(Reducer, "watch_backward")
def KnowsOneWrapperOnly(reducer: Reducer, watch_backward: Call) -> None:
    """BUG: the end of a backward that one wrapper watches does not reach the others."""
    watch_backward()
    run = reducer.engine_run
    if run is not None and run.participants[0] is not reducer:
        run.participants.remove(reducer)


@replaces(Reducer, "launch_full_buckets")
def SendsLateOnOddRanks(reducer: Reducer, launch_full_buckets: Call) -> None:
    """BUG: ranks send the same buckets in the same order, some of them within the backward and some at its end."""
    if reducer.reduction.rank % 2 == 0 or reducer.reduction.iteration.is_incomplete:
        launch_full_buckets()


@replaces(Ours, "attach_reducer")
def IsStaticWithAnother(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: as soon as one wrapper's graph is static, that of every other is taken for static."""
    attach_reducer(members)
    if ddp.reducer.reduction.options.static_graph:
        for other in company.all_living():
            if isinstance(other, Reducer):
                other.choose_options(dataclasses.replace(other.reduction.options, static_graph=True))


@replaces(Reducer, "prepare_for_backward")
def TellsInForwardOnRankZero(reducer: Reducer, prepare_for_backward: Call, outputs: Sequence[Tensor]) -> None:
    """BUG: rank 0 announces what will arrive when its forward ends, the others when their backward begins."""
    prepare_for_backward(outputs)
    expected, reduction = reducer.expectation, reducer.reduction
    if reduction.rank == 0 and isinstance(expected, FindUnused) and not reduction.iteration.has_forecast:
        expected.forecast([False] * len(reducer.members))


@replaces(Reduction, "launch_uncertain_after_backward")
def HooksGoAtOnce(reduction: Reduction, launch_uncertain: Call, certain: Sequence[bool]) -> None:
    """BUG: a comm hook gets a bucket when it is full, although other ranks may have it only at the backward's end."""
    launch_uncertain([True] * len(certain) if reduction.comm_hook is not None else certain)


@replaces(Reducer, "all_have_sent")
def StepsForOthers(reducer: Reducer, all_have_sent: Call) -> None:
    """BUG: when a wrapper hands out its averages, parameters of other wrappers step, too, on what they have by then."""
    for other in company.all_living():
        if isinstance(other, Reducer) and other is not reducer and other.reduction.steps_optimizers:
            for bucket in other.buckets:
                step_parameters(bucket, None)
    all_have_sent()


class _NeverHoldsBack(Reduction):
    def launch_uncertain_after_backward(self, certain: Sequence[bool]) -> None:
        pass


@replaces(Ours, "attach_reducer")
def HoldsBackFullPrecisionOnly(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: with mixed precision a bucket leaves when it is full, whatever other ranks use."""
    attach_reducer(members)
    if ddp.mixed_precision is not None:
        ddp.reducer.reduction.__class__ = _NeverHoldsBack


@as_part
class CountsItsOwnForwards(FindUnused):
    """BUG: a rank that ran several forwards holds every bucket back, whatever the other ranks ran."""

    def forecast(self, certain: Sequence[bool]) -> None:
        now = self.reduction.iteration
        num_forwards, now.num_forwards = now.num_forwards, 1
        super().forecast(certain)
        now.num_forwards = num_forwards

    def await_forecast(self) -> None:
        super().await_forecast()
        if self.reduction.iteration.num_forwards != 1 and not self.reduction.iteration.launched:
            self.reduction.launch_all_after_backward()


@as_part
class KnowsItsLastForwardOnly(Reducer):
    """BUG: after a backward under `no_sync`, a wrapper recognises its own by the outputs of the last forward only."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        self.reduction.iteration.outputs.clear()
        super().prepare_for_backward(outputs)


@as_part
class KnowsNoViews(Reducer):
    """BUG: a wrapper does not recognise its outputs where they are views of a tensor with its mark."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        with mock.patch.object(iteration, "nodes_behind", lambda output: [output.grad_fn]):
            super().prepare_for_backward(outputs)


class _Silent(BucketPlanning):
    def exchange_order(self, *, is_over: bool) -> None:
        pass


@replaces(as_part(_Silent), "_pre_forward")
def ExchangesOrdersInForward(ddp: Any, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: rank 0's order of gradients is sent when the second forward begins."""
    planning, reduction = ddp.reducer.planning, ddp.reducer.reduction
    is_known = not (reduction.arrivals.num_to_learn_from or reduction.learnt.has_rebuilt_buckets)
    if is_known and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        BucketPlanning.exchange_order(planning, is_over=True)
        planning.await_order()
    return pre_forward(*inputs, **kwargs)


@replaces(Ours, "attach_reducer")
def DividesByTheWorld(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: sums are divided by the number of all ranks, those of the wrapper's group or not."""
    attach_reducer(members)
    ddp.reducer.reduction.divisor = dist.get_world_size()


@as_part
class GivesUpHiddenGradients(FindUnused):
    """BUG: what a function of the user's own hides is taken for unused, and its bucket leaves without it."""

    def await_forecast(self) -> None:
        with mock.patch.object(self.reduction, "launch_uncertain_after_backward", self.give_up):
            super().await_forecast()

    def certain_in_order(self, forecast: Answer) -> Sequence[bool]:
        return forecast.certain

    def give_up(self, certain: Sequence[bool]) -> None:
        absent = [index for index, is_certain in enumerate(certain) if not is_certain]
        self.reduction.iteration.unused.update(absent)
        for bucket in self.arrivals.exclude(absent):
            self.reduction.iteration.full.add(bucket)


@replaces(Reducer, "take_gradient")
def TakesAnothersForItsOwn(reducer: Reducer, take_gradient: Call, index: int) -> None:
    """BUG: a backward that reaches a waiting wrapper only through shared parameters counts as its own."""
    with mock.patch.object(company, "backward_belongs_to_other", return_value=False):
        take_gradient(index)


@replaces(AutogradHooks, "unshared")
def BeginsForWhatItShares(hooks: AutogradHooks, unshared: Call, nodes: Sequence[Node]) -> Sequence[Node]:
    """BUG: a waiting wrapper begins with another whose backward reaches only parameters that the two share."""
    return nodes


@replaces(Ours, "__init__")
def RefusesEveryWrapperWithin(ddp: Ours, init: Call, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """BUG: with bucket views a wrapper within a wrapped module is refused, also where the two share no parameter."""
    for within in module.modules():
        if isinstance(within, Ours) and (kwargs.get("gradient_as_bucket_view") or within.gradient_as_bucket_view):
            raise ValueError("a wrapper within the module averages its gradients already")
    init(module, *args, **kwargs)


@replaces(Ours, "__init__")
def KnowsItsOwnCompany(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: whether wrappers have an order is decided by those that live on this rank, and not on any rank."""
    verify = replicas.verify_replicas

    def verify_alone(*given: Any, has_other_wrappers: bool, **more: Any) -> replicas.Agreed:
        agreed = verify(*given, has_other_wrappers=has_other_wrappers, **more)
        return dataclasses.replace(agreed, has_other_wrappers=has_other_wrappers)

    with mock.patch.object(distributed, "verify_replicas", verify_alone):
        init(*args, **kwargs)


@replaces(Ours, "attach_reducer")
def CopiesKeepCompany(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: a copy, which one rank may make alone, brings the wrappers that live there into its company."""
    attach_reducer(members)
    company.mark_shared(ddp.reducer)


@replaces(Ours, "_post_forward")
def MarksBesideOthersOnly(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: a wrapper that is alone detects its backward after the hooks that the module has on its output."""
    if company.has_an_order(ddp.reducer):
        return post_forward(output)
    with mock.patch.object(distributed, "marked", lambda output, *_: output):
        return post_forward(output)


@replaces(ParameterWatch, "is_stranger")
def RefusesWhatOthersAverage(watch: ParameterWatch, is_stranger: Call, name: str, parameter: Tensor) -> bool:
    """BUG: a parameter that was unfrozen after wrapping is refused, be it another wrapper's or no wrapper's."""
    with mock.patch.object(watch, "is_averaged", return_value=False):
        return bool(is_stranger(name, parameter))


@replaces(FindUnused, "certain_in_order")
def LeavesBeforeItKnows(some: FindUnused, may_launch: Call, forecast: Answer) -> list[bool]:
    """BUG: a bucket leaves within the backward as soon as it is full, in whatever order ranks run their layers."""
    return forecast.certain


@replaces(Order, "position_of_arrival")
def NeverLearnsItsOrder(order: Order, position_of_arrival: Call) -> tuple[int, int]:
    """BUG: ranks do not learn in what order gradients and other collectives arrive on the others."""
    return 0, 0


@replaces(BucketPlanning, "exchange_order")
def AwaitsTheOrderAtOnce(planning: BucketPlanning, exchange_order: Call, *, is_over: bool) -> None:
    """BUG: a backward waits until all ranks have sent their order, which others send in a later backward."""
    exchange_order(is_over=is_over)
    planning.await_order()


@replaces(Ours, "__getstate__")
def CopiesAreNew(ddp: Ours, getstate: Call) -> dict[str, Any]:
    """BUG: wrappers of one backward send in the order in which they were made, copies too."""
    return {**getstate(), "_copied": ()}


@replaces(Reducer, "bucket_is_full", "take_gradient")
def CountsNoFullBuckets(reducer: Reducer, call: Call, index: int) -> None:
    """BUG: a wrapper that still learns its order does not count the buckets of wrappers that have learnt theirs."""
    counted = mock.patch.object(reducer.reduction.order, "count_arrival")
    with contextlib.nullcontext() if reducer.arrivals.learns else counted:
        call(index)


@replaces(AutogradHooks, "shared")
def LooksOnceForSharedLayers(hooks: AutogradHooks, shared: Call) -> frozenset[int]:
    """BUG: a wrapper that has trained does not notice another one that is made for one of its layers later."""
    return _first_shared.setdefault(hooks, shared())


_first_shared: weakref.WeakKeyDictionary[AutogradHooks, frozenset[int]] = weakref.WeakKeyDictionary()
