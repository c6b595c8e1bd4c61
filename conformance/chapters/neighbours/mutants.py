"""Mutants of chapter neighbours: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from ddp_impl.reducer.local_backward import LocalBackward
from ddp_impl.reducer.order_check import OrderCheck
from ddp_impl.reducer.parameter_usage import ParameterUsage
from ddp_impl.reducer.reducer_state import Phase
from ddp_impl.wire.forecast import Told
from torch import Tensor, nn
from torch.autograd.graph import Node

from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api import distributed
from ddp_impl.autograd import backwards
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.module import replicas
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.reducer import iteration
from ddp_impl.reducer.optimizer_in_backward import step_parameters
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.wire.peers import Peers


@as_part
class LeavesWithItsLastGradient(Reducer):
    """BUG: a bucket leaves with the last gradient that this rank uses, whatever other ranks use."""

    def announce(self) -> None:
        super().announce()
        if self.reduction.options.find_unused_parameters:
            self.reduction.hold_back = lambda sure: None  # type: ignore[method-assign]
            self.absences.may_still_come = lambda index: False  # type: ignore[method-assign]
            absent = [index for index, comes in enumerate(self.search.coming()) if not comes]
            self.usage.unused.update(absent)
            for bucket in self.arrivals.exclude(absent):
                self._bucket_full(bucket)


@as_part
class TellsWithItsFirstBucket(Reduction):
    """BUG: what is sure to come is exchanged when this rank's first bucket is full, and not when backward begins."""

    def tell_others(self, coming: Sequence[bool]) -> None:
        if self._is_asked:
            super().tell_others(coming)

    def read_forecast(self) -> None:
        self._is_asked = True
        super().read_forecast()
        self._is_asked = False

    _is_asked = False


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
    """BUG: after `torch.autograd.grad`, or a gradient that came early, a wrapper tells what comes at its own output."""
    return reducer.state.phase is Phase.ARMED and begins_with_others(repeated)


@replaces(Reducer, "has_more_to_send")
def SendsAsGradientsCome(reducer: Reducer, has_more_to_send: Call) -> bool:
    """BUG: of two wrappers that one sends first whose gradients come first on this rank."""
    return False


@replaces(Reducer, "watch_backward")
def KnowsOneWrapperOnly(reducer: Reducer, watch_backward: Call) -> None:
    """BUG: a wrapper does not hear of the end of a backward that another one has begun to watch."""
    if not backwards._running:
        watch_backward()


@replaces(Reducer, "launch_full_buckets")
def SendsLateOnOddRanks(reducer: Reducer, launch_full_buckets: Call) -> None:
    """BUG: ranks send the same buckets in the same order, some of them within the backward and some at its end."""
    if reducer.state.rank % 2 == 0 or reducer.state.phase is Phase.INCOMPLETE:
        launch_full_buckets()


@replaces(Ours, "attach_reducer")
def IsStaticWithAnother(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: as soon as one wrapper's graph is static, that of every other is taken for static."""
    attach_reducer(members)
    if ddp.reducer.reduction.options.static_graph:
        for other in list(backwards._living):
            if isinstance(other, Reducer):
                other.reduction.options = dataclasses.replace(other.reduction.options, static_graph=True)


@replaces(Reducer, "prepare_for_backward")
def TellsInForwardOnRankZero(reducer: Reducer, prepare_for_backward: Call, outputs: Iterable[Tensor]) -> None:
    """BUG: rank 0 tells when its forward ends what will come, the others when their backward begins."""
    prepare_for_backward(outputs)
    if reducer.state.rank == 0 and reducer.ranks_may_differ and not reducer.reduction.iteration.has_forecast:
        reducer.reduction.tell_others([False] * len(reducer.members))


@replaces(Reduction, "hold_back_uncertain")
def HooksGoAtOnce(reduction: Reduction, hold_back: Call, sure: Sequence[bool]) -> None:
    """BUG: a comm hook gets a bucket when it is full, although other ranks may have it only at the backward's end."""
    hold_back([True] * len(sure) if reduction.comm_hook is not None else sure)


@replaces(Reducer, "all_have_sent")
def StepsForOthers(reducer: Reducer, all_have_sent: Call) -> None:
    """BUG: when a wrapper hands out its averages, parameters of other wrappers step, too, on what they have by then."""
    for other in list(backwards._living):
        if isinstance(other, Reducer) and other is not reducer and other.reduction.steps_optimizers:
            for bucket in other.buckets:
                step_parameters(bucket, None)
    all_have_sent()


class _NeverHoldsBack(Reduction):
    def hold_back(self, sure: Sequence[bool]) -> None:
        pass


@replaces(Ours, "attach_reducer")
def HoldsBackFullPrecisionOnly(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: with mixed precision a bucket leaves when it is full, whatever other ranks use."""
    attach_reducer(members)
    if ddp.mixed_precision is not None:
        ddp.reducer.reduction.__class__ = _NeverHoldsBack


@as_part
class CountsItsOwnForwards(Reduction):
    """BUG: a rank that ran several forwards holds every bucket back, whatever the other ranks ran."""

    def tell_others(self, coming: Sequence[bool]) -> None:
        num_forwards, self.iteration.num_forwards = self.iteration.num_forwards, 1
        super().tell_others(coming)
        self.iteration.num_forwards = num_forwards

    def hold_back(self, sure: Sequence[bool]) -> None:
        super().hold_back_uncertain(sure if self.iteration.num_forwards == 1 else [False] * len(sure))


@as_part
class KnowsItsLastForwardOnly(Reducer):
    """BUG: after a backward under `no_sync`, a wrapper knows its own one by the outputs of the last forward only."""

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        self.reduction.iteration.outputs.clear()
        super().prepare_for_backward(outputs)


@as_part
class KnowsNoViews(Reducer):
    """BUG: a wrapper does not know its own outputs where they are views of what has its mark."""

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        with mock.patch.object(iteration, "nodes_behind", lambda output: [output.grad_fn]):
            super().prepare_for_backward(outputs)


@as_part
class ExchangesOrdersInForward(BucketPlanning):
    """BUG: rank 0's order of gradients is sent when the second forward begins."""

    def exchange_order(self, group: dist.ProcessGroup, peers: Peers, places: Callable[[], bytes | None]) -> None:
        pass

    def rebuild(self, group: dist.ProcessGroup, peers: Peers, awaiting: Any) -> None:
        super().exchange_order(group, peers, lambda: None)
        self.await_order(peers, mock.Mock(OrderCheck, is_own=False))
        super().rebuild(group, peers, awaiting)


@replaces(Ours, "attach_reducer")
def DividesByTheWorld(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: sums are divided by the number of all ranks, those of the wrapper's group or not."""
    attach_reducer(members)
    ddp.reducer.reduction.divisor = dist.get_world_size()


@replaces(Ours, "attach_reducer")
def GivesUpHiddenGradients(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: what a function of the user's own hides is taken for unused, and its bucket leaves without it."""
    attach_reducer(members)
    reducer = ddp.reducer

    def give_up(sure: Sequence[bool]) -> None:
        absent: Collection[int] = [index for index, comes in enumerate(sure) if not comes]
        reducer.usage.unused.update(absent)
        for bucket in reducer.arrivals.exclude(absent):
            reducer._bucket_full(bucket)

    reducer.reduction.hold_back = give_up  # type: ignore[method-assign]


@replaces(LocalBackward, "is_anothers")
def TakesAnothersForItsOwn(local: LocalBackward, is_anothers: Call, index: int) -> bool:
    """BUG: a backward that comes to no output of a waiting wrapper, but to what it shares with another, is its own."""
    return False


@replaces(AutogradHooks, "unshared")
def BeginsForWhatItShares(hooks: AutogradHooks, unshared: Call, nodes: Sequence[Node]) -> Sequence[Node]:
    """BUG: a waiting wrapper begins with another whose backward comes to what the two share, and to nothing else."""
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

    def verify_alone(*given: Any, in_company: bool) -> replicas.Agreed:
        return dataclasses.replace(verify(*given, in_company=in_company), in_company=in_company)

    with mock.patch.object(distributed, "verify_replicas", verify_alone):
        init(*args, **kwargs)


@replaces(Ours, "attach_reducer")
def CopiesKeepCompany(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: a copy, which one rank may make alone, brings the wrappers that live there into its company."""
    attach_reducer(members)
    backwards.keep_company(ddp.reducer)


@replaces(Ours, "_post_forward")
def MarksBesideOthersOnly(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: a wrapper that is alone hears of its backward behind the hooks that the module has on its output."""
    if backwards.has_an_order(ddp.reducer):
        return post_forward(output)
    with mock.patch.object(distributed, "marked", lambda heard, *_: heard):
        return post_forward(output)


@replaces(ParameterWatch, "_is_stranger")
def RefusesWhatOthersAverage(watch: ParameterWatch, is_stranger: Call, name: str, parameter: Tensor) -> bool:
    """BUG: a parameter that was unfrozen after wrapping is refused, be it another wrapper's or nobody's."""
    with mock.patch.object(watch, "_is_averaged", return_value=False):
        return bool(is_stranger(name, parameter))


@replaces(OrderCheck, "check")
def NeverComparesPlaces(order: OrderCheck, check: Call, averages: Sequence[Tensor]) -> None:
    """BUG: where ranks run layers or wrappers in different orders, what has met another collective is handed out."""
    order._said = ""


@replaces(OrderCheck, "check")
def ComparesPlacesAlone(order: OrderCheck, check: Call, averages: Sequence[Tensor]) -> None:
    """BUG: a message that two ranks send each other between two buckets is taken for one that a bucket has met."""
    with mock.patch.object(order._peers, "speakers_say", return_value=False):
        check(averages)


@replaces(OrderCheck, "_may_be_messages")
def TakesMessagesForCollectives(order: OrderCheck, may_be_messages: Call) -> bool:
    """BUG: a message that one rank sends within backward, alone and from some step on, is taken for a collective."""
    return False


@replaces(OrderCheck, "early")
def LeavesBeforeItKnows(order: OrderCheck, early: Call, told: Told, buckets: Sequence[Any]) -> list[bool]:
    """BUG: a bucket leaves within the backward as soon as it is full, in whatever order ranks run their layers."""
    return told.sure


@replaces(OrderCheck, "places_of")
def NeverLearnsItsOrder(order: OrderCheck, places_of: Call, came: Mapping[int, tuple[int, int]]) -> None:
    """BUG: ranks do not find out in what order gradients and other collectives come on the others."""


@replaces(OrderCheck, "leaves")
def RefusesNewPlaces(order: OrderCheck, leaves: Call, *, is_last: bool, **told: bool) -> None:
    """BUG: a bucket may not leave elsewhere than in the iteration before, though all ranks have changed alike."""
    leaves(is_last=is_last, **told)
    if is_last and order._agreed and order._places != order._agreed:
        raise order._error("the order of collectives has changed")


@replaces(BucketPlanning, "exchange_order")
def AwaitsTheOrderAtOnce(planning: BucketPlanning, exchange_order: Call, *told: Any) -> None:
    """BUG: a backward is over when all ranks have told their order, which others tell in a later backward."""
    exchange_order(*told)
    if planning._exchange is not None:
        planning._exchange.result()


@replaces(OrderCheck, "leaves")
def CountsFromTheBackward(order: OrderCheck, leaves: Call, **told: bool) -> None:
    """BUG: where a bucket leaves is counted from the first bucket of the backward, whichever wrapper's that is."""
    first = order._tally.last
    leaves(**told)
    order._tally.last = order._tally.last if first is None else first


@replaces(Ours, "__getstate__")
def CopiesAreNew(ddp: Ours, getstate: Call) -> dict[str, Any]:
    """BUG: wrappers of one backward send in the order in which they were made, copies too."""
    return {**getstate(), "_copied": ()}


@replaces(Reduction, "fills")
def CountsNoFullBuckets(reduction: Reduction, fills: Call, bucket: int) -> None:
    """BUG: a wrapper that learns its order does not hear of buckets of those that have learnt theirs."""
    with mock.patch.object(reduction.order, "count"):
        fills(bucket)


@replaces(OrderCheck, "leaves")
def ComparesNothingOfHooks(order: OrderCheck, leaves: Call, *, is_last: bool, **told: bool) -> None:
    """BUG: with a comm hook, be it one that sums, ranks do not find out that an order has become a rank's own."""
    leaves(is_last=is_last, is_told=not told)


@replaces(ParameterUsage, "begin_agreeing")
def TellsNoNewsBesideMessages(usage: ParameterUsage, begin_agreeing: Call, *given: Any, news: int, **told: Any) -> None:
    """BUG: where all ranks change their order, one that sends messages as well does not say that its own is new."""
    begin_agreeing(*given, news=news % 2, **told)
