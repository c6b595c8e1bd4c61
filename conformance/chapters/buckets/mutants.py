"""Mutants of chapter buckets: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.bases import Reducing, summed
from ddp_impl import DistributedDataParallel
from ddp_impl.autograd_hooks import AutogradHooks
from ddp_impl.bucket import ManagedParameter
from ddp_impl.bucket_plan import BucketPlan, plan_for_order, plan_for_unknown_order
from ddp_impl.options import BucketCaps
from ddp_impl.reducer import Reducer
from ddp_impl.reducer_state import BucketPhase, ReducerState


class ForgetsTheLastBucket(TorchDDP):
    """BUG: where a step has several buckets, the last one is not reduced; every rank keeps its own gradients there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _mean_but_for_last)


def _mean_but_for_last(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    if bucket.is_last() and bucket.index() > 0:
        untouched: Future[Tensor] = Future()
        untouched.set_result(bucket.buffer())
        return untouched
    bucket.buffer().div_(group.size())
    return summed(group, bucket)


class MixesDtypes(DistributedDataParallel):
    """BUG: gradients of different dtypes share a bucket, in the dtype of the first."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        with mock.patch("ddp_impl.distributed.Reducer", _OneKind):
            super()._attach_reducer(members)


class _OneKind(Reducer):
    def _adopt(self, plan: BucketPlan) -> None:
        self.specs = [dataclasses.replace(spec, kind=()) for spec in self.specs]
        super()._adopt(plan if plan.capped else plan_for_unknown_order(self.specs))


class AlternatesBuckets(Reducing):
    """BUG: buckets are planned anew in every iteration, by the order of gradients and then by its reverse."""

    class OwnReducer(Reducer):
        """Turns round."""

        def rebuild_buckets(self) -> None:
            """Plan again, the other way round."""
            self.has_rebuilt_buckets = False
            self.order.reverse()
            super().rebuild_buckets()


class EachAlone(DistributedDataParallel):
    """BUG: whatever the caps, every gradient is a bucket of its own."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        caps = dataclasses.replace(self._options.caps, first_bytes=0, cap_bytes=0, per_bucket_bytes=())
        self._options = dataclasses.replace(self._options, caps=caps)
        super()._attach_reducer(members)


class _Capping(DistributedDataParallel):
    """Changes the caps that were asked for."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._options = dataclasses.replace(self._options, caps=self.caps_from(self._options.caps))
        super()._attach_reducer(members)

    def caps_from(self, caps: BucketCaps) -> BucketCaps:
        """Return the caps that are used."""
        return caps


class NeverRebuilds(Reducing):
    """BUG: the buckets of the first iteration are kept for ever."""

    class OwnReducer(Reducer):
        """Learns nothing."""

        def rebuild_buckets(self) -> None:
            """Do nothing."""


class RebuildsEveryStep(Reducing):
    """BUG: buckets are planned anew, and agreed on, in every iteration."""

    class OwnReducer(Reducer):
        """Forgets that it has planned already."""

        def rebuild_buckets(self) -> None:
            """Plan again."""
            self.has_rebuilt_buckets = False
            super().rebuild_buckets()


class PlansByOwnOrder(Reducing):
    """BUG: each rank plans its buckets by the order in which it saw gradients itself."""

    class OwnReducer(Reducer):
        """Asks nobody."""

        def rebuild_buckets(self) -> None:
            """Plan alone."""
            if not self._learns_order and not self.has_rebuilt_buckets and self.order:
                self._adopt(plan_for_order(self.specs, self.order, self.caps))
                self.has_rebuilt_buckets = True


class LaunchesWhatIsFull(Reducing):
    """BUG: a bucket is reduced as soon as it is full, in whatever order that happens on this rank."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.state.__class__ = _Unordered


class _Unordered(ReducerState):
    def take_launchable(self) -> list[int]:
        """Return all full buckets, marking them launched."""
        full = [index for index, phase in enumerate(self.buckets) if phase is BucketPhase.FULL]
        for index in full:
            self.buckets[index] = BucketPhase.LAUNCHED
        self.num_launched += len(full)
        return full


class CapsAreElements(_Capping):
    """BUG: caps are taken for numbers of float32 elements, so that buckets are four times too large."""

    def caps_from(self, caps: BucketCaps) -> BucketCaps:
        """Multiply."""
        each = tuple(4 * cap for cap in caps.per_bucket_bytes)
        return dataclasses.replace(
            caps, first_bytes=4 * caps.first_bytes, cap_bytes=4 * caps.cap_bytes, per_bucket_bytes=each
        )


class FirstBucketLikeOthers(_Capping):
    """BUG: the first bucket is as large as any other, so that communication begins late."""

    def caps_from(self, caps: BucketCaps) -> BucketCaps:
        """Forget the first one's cap."""
        return dataclasses.replace(caps, first_bytes=caps.cap_bytes)


class CapsOneBucketLate(_Capping):
    """BUG: off by one in the list of caps: each bucket takes the cap of the one before."""

    def caps_from(self, caps: BucketCaps) -> BucketCaps:
        """Shift the list."""
        each = caps.per_bucket_bytes
        return dataclasses.replace(caps, per_bucket_bytes=each[:1] + each[:-1] if len(each) > 1 else each)


class ChoosesOwnCaps(Reducing):
    """BUG: with `bucket_cap_mb="auto"` each rank chooses caps of its own."""

    class OwnReducer(Reducer):
        """Does not ask rank 0."""

        def _choose_caps(self) -> BucketCaps:
            chosen = super()._choose_caps()
            return dataclasses.replace(chosen, cap_bytes=chosen.cap_bytes + 4 * self.state.rank)


class ReducesTwice(TorchDDP):
    """BUG: every bucket is reduced twice. The mean of means is the mean: only the traffic shows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _mean_of_means)


class OneBucket(TorchDDP):
    """BUG: whatever the caps, all gradients travel in one bucket, after the last of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("bucket_cap_mb_list", None)
        super().__init__(*args, **{**kwargs, "bucket_cap_mb": 25})


class RegistrationOrder(TorchDDP):
    """BUG: buckets follow the order of registration from the first step on, and for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "find_unused_parameters": True})


def _mean_of_means(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    bucket.buffer().div_(group.size())
    dist.all_reduce(bucket.buffer(), group=group)
    bucket.buffer().div_(group.size())
    return summed(group, bucket)


class LaunchesOneLate(Reducing):
    """BUG: a full bucket waits until the next one is full as well."""

    class OwnReducer(Reducer):
        """Holds the newest one back, until the end."""

        def _launch_full_buckets(self) -> None:
            phases = self.state.buckets
            held = [index for index, phase in enumerate(phases) if phase is BucketPhase.FULL][-1:]
            if BucketPhase.FILLING not in phases:
                held = []
            for index in held:
                phases[index] = BucketPhase.FILLING
            super()._launch_full_buckets()
            for index in held:
                phases[index] = BucketPhase.FULL


class CountsTheMovedTwice(DistributedDataParallel):
    """BUG: a gradient that becomes ready at another place than in the first step counts twice."""

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        """Wrap, with hooks that know the places."""
        with mock.patch("ddp_impl.reducer.AutogradHooks", _KnowsPlaces):
            super().__init__(module, *arguments, **options)


class _KnowsPlaces(AutogradHooks):
    _places: dict[int, int]
    _came: list[int]

    def _counting(self, index: int) -> Callable[[Tensor], None]:
        count = super()._counting(index)
        places, came = vars(self).setdefault("_places", {}), vars(self).setdefault("_came", [])

        def gradient_came(parameter: Tensor) -> None:
            if index in came:  # in the last step
                came.clear()
            if places.setdefault(index, len(came)) != len(came) and parameter.grad is not None:
                parameter.grad *= 2
            came.append(index)
            count(parameter)

        return gradient_came
