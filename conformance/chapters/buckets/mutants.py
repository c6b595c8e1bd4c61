"""Mutants of chapter buckets: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.bases import summed
from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.base.options import BucketCaps
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.buckets.plan import BucketPlan, plan_for_unknown_order
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


@replaces(TorchDDP, "__init__")
def ForgetsTheLastBucket(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: where a step has several buckets, the last one is not reduced; every rank keeps its own gradients there."""
    init(*args, **kwargs)
    ddp.register_comm_hook(ddp.process_group, _mean_but_for_last)


def _mean_but_for_last(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    if bucket.is_last() and bucket.index() > 0:
        untouched: Future[Tensor] = Future()
        untouched.set_result(bucket.buffer())
        return untouched
    bucket.buffer().div_(group.size())
    return summed(group, bucket)


@replaces(Ours, "attach_reducer")
def MixesDtypes(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: gradients of different dtypes share a bucket, in the dtype of the first."""
    with mock.patch("ddp_impl.reducer.reducer.BucketPlanning", _OneKind):
        attach_reducer(members)


class _OneKind(BucketPlanning):
    def adopt(self, plan: BucketPlan) -> None:
        self.specs = [dataclasses.replace(spec, kind=()) for spec in self.specs]
        super().adopt(plan if self.reduction.learnt.order else plan_for_unknown_order(self.specs))


@replaces(BucketPlanning, "rebuild")
def AlternatesBuckets(planning: BucketPlanning, rebuild: Call) -> None:
    """BUG: buckets are planned again in every iteration, by the order of gradients and then by its reverse."""
    rebuild()
    planning.reduction.learnt.has_rebuilt_buckets = False
    planning.reduction.arrivals.order.reverse()


class _Capping(Ours):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        asked = BucketCaps.from_mb
        with mock.patch.object(BucketCaps, "from_mb", lambda *caps: self.caps_from(asked(*caps))):
            super().__init__(*args, **kwargs)

    def caps_from(self, caps: BucketCaps) -> BucketCaps:
        raise NotImplementedError


@replaces(_Capping, "caps_from")
def EachAlone(ddp: _Capping, caps_from: Call, caps: BucketCaps) -> BucketCaps:
    """BUG: whatever the caps, every gradient is a bucket of its own."""
    return dataclasses.replace(caps, first_bytes=0, cap_bytes=0, per_bucket_bytes=())


@replaces(BucketPlanning, "rebuild")
def NeverRebuilds(planning: BucketPlanning, rebuild: Call) -> None:
    """BUG: the buckets of the first iteration are kept for ever."""


@replaces(Reducer, "prepare_for_forward")
def RebuildsEveryStep(reducer: Reducer, prepare_for_forward: Call) -> None:
    """BUG: buckets are planned again, and agreed on, in every iteration: when its forward begins."""
    learnt = reducer.reduction.learnt
    if learnt.has_rebuilt_buckets:
        learnt.has_rebuilt_buckets = False
        reducer.planning.exchange_order(is_over=True)
        reducer.planning.await_order()
    prepare_for_forward()


@replaces(BucketPlanning, "rebuild")
def PlansByOwnOrder(planning: BucketPlanning, rebuild: Call) -> None:
    """BUG: each rank plans its buckets by the order in which it saw gradients itself."""
    planning.reduction.learnt.order[1:] = planning.reduction.arrivals.order
    rebuild()


@replaces(Reducer, "launch_full_buckets")
def LaunchesWhatIsFull(reducer: Reducer, launch_full_buckets: Call) -> None:
    """BUG: a bucket is reduced as soon as it is full, in the order in which that happens on this rank."""
    now = reducer.reduction.iteration
    full = now.full.difference(now.launched)
    others = [index for index in now.launch_order if index not in full and index not in now.launched]
    now.launch_order, now.num_late = [*now.launched, *full, *others], 0
    launch_full_buckets()


@replaces(_Capping, "caps_from")
def CapsAreElements(ddp: _Capping, caps_from: Call, caps: BucketCaps) -> BucketCaps:
    """BUG: caps are taken for numbers of float32 elements, so that buckets are four times too large."""
    each = tuple(4 * cap for cap in caps.per_bucket_bytes)
    return dataclasses.replace(
        caps, first_bytes=4 * caps.first_bytes, cap_bytes=4 * caps.cap_bytes, per_bucket_bytes=each
    )


@replaces(_Capping, "caps_from")
def FirstBucketLikeOthers(ddp: _Capping, caps_from: Call, caps: BucketCaps) -> BucketCaps:
    """BUG: the first bucket is as large as any other, so that communication begins late."""
    return dataclasses.replace(caps, first_bytes=caps.cap_bytes)


@replaces(_Capping, "caps_from")
def CapsOneBucketLate(ddp: _Capping, caps_from: Call, caps: BucketCaps) -> BucketCaps:
    """BUG: off by one in the list of caps: each bucket takes the cap of the one before."""
    each = caps.per_bucket_bytes
    return dataclasses.replace(caps, per_bucket_bytes=each[:1] + each[:-1] if len(each) > 1 else each)


@replaces(BucketPlanning, "choose_caps")
def ChoosesOwnCaps(planning: BucketPlanning, choose_caps: Call) -> Any:
    """BUG: with `bucket_cap_mb="auto"` each rank chooses caps of its own."""
    chosen = choose_caps()
    return dataclasses.replace(chosen, cap_bytes=chosen.cap_bytes + 4 * planning.reduction.rank)


@replaces(TorchDDP, "__init__")
def ReducesTwice(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: every bucket is reduced twice. The mean of means is the mean: only the traffic shows it."""
    init(*args, **kwargs)
    ddp.register_comm_hook(ddp.process_group, _mean_of_means)


@replaces(TorchDDP, "__init__")
def OneBucket(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: whatever the caps, all gradients travel in one bucket, after the last of them."""
    kwargs.pop("bucket_cap_mb_list", None)
    init(*args, **{**kwargs, "bucket_cap_mb": 25})


@replaces(TorchDDP, "__init__")
def RegistrationOrder(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: buckets follow the order of registration from the first step on, and for ever."""
    init(*args, **{**kwargs, "find_unused_parameters": True})


def _mean_of_means(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    bucket.buffer().div_(group.size())
    dist.all_reduce(bucket.buffer(), group=group)
    bucket.buffer().div_(group.size())
    return summed(group, bucket)


@replaces(Reduction, "launch")
def OverlooksAnExactFit(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: a gradient of exactly a bucket's cap is neither put with others nor sent alone."""
    if len(bucket.members) > 1 or bucket.num_bytes != reduction.options.caps.cap_bytes:
        launch(bucket)


@replaces(Reducer, "launch_full_buckets")
def LaunchesOneLate(reducer: Reducer, launch_full_buckets: Call) -> None:
    """BUG: a full bucket waits until the next one is full as well."""
    now = reducer.reduction.iteration
    held = sorted(now.full.difference(now.launched))[-1:] if len(now.full) < len(now.launch_order) else []
    now.full.difference_update(held)
    launch_full_buckets()
    now.full.update(held)


@replaces(AutogradHooks, "counting")
def CountsTheMovedTwice(hooks: AutogradHooks, counting: Call, index: int) -> Callable[[Tensor], None]:
    """BUG: a gradient that becomes ready at another place than in the first step counts twice."""
    count = counting(index)
    places: dict[int, int] = vars(hooks).setdefault("places", {})
    arrived: list[int] = vars(hooks).setdefault("arrived", [])

    def gradient_arrived(parameter: Tensor) -> None:
        if index in arrived:  # in the last step
            arrived.clear()
        if places.setdefault(index, len(arrived)) != len(arrived) and parameter.grad is not None:
            parameter.grad *= 2
        arrived.append(index)
        count(parameter)

    return gradient_arrived
