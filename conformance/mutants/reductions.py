"""DDPs that plan, reduce or hand out wrongly, each in one way: `ddp_impl`, changed in its reducer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl import DistributedDataParallel, collectives
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.bucket_plan import BucketPlan, plan_for_order
from ddp_impl.options import BucketCaps
from ddp_impl.parameter_usage import ParameterUsage
from ddp_impl.reducer import Reducer
from ddp_impl.reducer_state import BucketPhase, Event, ReducerState


class Reducing(DistributedDataParallel):
    """Gives a DDP the reducer and the account of used parameters that a mutant defines."""

    OwnReducer: type[Reducer] = Reducer
    OwnUsage: type[ParameterUsage] = ParameterUsage

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.__class__ = self.OwnReducer
        self.reducer.usage.__class__ = self.OwnUsage


class _Capping(DistributedDataParallel):
    """Changes the caps that were asked for."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._options = dataclasses.replace(self._options, caps=self.caps_from(self._options.caps))
        super()._attach_reducer(members)

    def caps_from(self, caps: BucketCaps) -> BucketCaps:
        """Return the caps that are used."""
        return caps


class DividesByAllRanks(DistributedDataParallel):
    """BUG: sums over a subgroup are divided by the number of all ranks."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.divisor = dist.get_world_size()


class LeavesOutTheLastElement(Reducing):
    """BUG: off by one, the last element of each bucket is not sent."""

    class OwnReducer(Reducer):
        """Sends too little."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            super()._start(bucket, buffer if bucket.sparse or self.comm_hook is not None else buffer[:-1])


class DoesNotWait(Reducing):
    """BUG: backward returns while the last all-reduce may still be under way."""

    class OwnReducer(Reducer):
        """Forgets to wait for the last bucket."""

        def _finalize(self) -> None:
            last = max(self._in_flight, default=-1)
            if self.comm_hook is None and last >= 0:
                buffer, work = self._in_flight[last]
                self.unwaited = work
                self._in_flight[last] = (buffer, NothingToWaitFor())
            super()._finalize()


class NothingToWaitFor:
    """Stands for the work of a collective."""

    def wait(self) -> None:
        """Return at once."""


class ReadsResults(Reducing):
    """BUG: sums are read from `Work.result()`, which not every backend has."""

    class OwnReducer(Reducer):
        """Asks the work."""

        def _finalize(self) -> None:
            for buffer, work in self._in_flight.values():
                if self.comm_hook is None:
                    work.wait()
                    buffer.copy_(work.result()[0])
            super()._finalize()


class SumsSparse(Reducing):
    """BUG: sparse gradients are summed and never divided."""

    class OwnReducer(Reducer):
        """Divides dense gradients only."""

        def _launch(self, bucket: Bucket) -> None:
            divisor = self.divisor
            self.divisor = 1 if bucket.sparse else divisor
            super()._launch(bucket)
            self.divisor = divisor


class MakesDense(Reducing):
    """BUG: a sparse gradient comes back dense."""

    class OwnReducer(Reducer):
        """Fills gradients up."""

        def _finalize(self) -> None:
            super()._finalize()
            for member in self.members:
                gradient = member.parameter.grad
                if gradient is not None and gradient.is_sparse:
                    member.parameter.grad = gradient.to_dense()


class ReducesInSinglePrecision(DistributedDataParallel):
    """BUG: whatever their dtype, gradients are averaged in float32."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._options = dataclasses.replace(self._options, reduce_dtype=torch.float32)
        super()._attach_reducer(members)


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


class LosesGradientsInRebuilding(Reducing):
    """BUG: when buckets are rebuilt, gradients that lived in the old ones are lost."""

    class OwnReducer(Reducer):
        """Empties new buckets."""

        def _adopt(self, plan: BucketPlan) -> None:
            super()._adopt(plan)
            for bucket in self.buckets:
                bucket.flat.zero_()


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


class AsksNobody(Reducing):
    """BUG: ranks do not ask each other which parameters were used."""

    class OwnUsage(ParameterUsage):
        """Believes itself."""

        def end_agreeing(self) -> None:
            """Wait, and take one's own answer."""
            own = self._flags(self.unused).tolist()
            super().end_agreeing()
            self.anywhere = [bool(used) for used in own]


class ForgetsEarlierUse(Reducing):
    """BUG: what was used under `no_sync` does not count as used when it is reduced."""

    class OwnUsage(ParameterUsage):
        """Counts the last backward alone."""

        def _flags(self, unused: set[int]) -> Tensor:
            self.used_locally.clear()
            return super()._flags(unused)


class UsedOnceIsUsed(Reducing):
    """BUG: a parameter that was used in some step counts as used in all later ones."""

    class OwnUsage(ParameterUsage):
        """Never forgets."""

        def end_agreeing(self) -> None:
            """Add what was known before."""
            before = self.anywhere
            super().end_agreeing()
            if before is not None and self.anywhere is not None:
                self.anywhere = [new or old for new, old in zip(self.anywhere, before, strict=True)]


class ZeroesForUnused(Reducing):
    """BUG: parameters that no rank used get zeros, which optimizers take for gradients."""

    class OwnReducer(Reducer):
        """Takes all for used."""

        def _used_by_now(self, bucket: Bucket, buffer: Tensor) -> list[bool] | None:
            return None


class SearchesBeforeBackwardOnly(Reducing):
    """BUG: parameters whose output the loss leaves out are waited for in vain."""

    class OwnReducer(Reducer):
        """Does not look again at the end."""

        def _missing_is_unused(self) -> bool:
            return False


class NeverSkips(Reducing):
    """BUG: `skip_all_reduce_unused_params` saves nothing."""

    class OwnReducer(Reducer):
        """Sends everything."""

        def _agree_on_skipped(self, absent: Sequence[int]) -> None:
            pass


class ForgivesMissingGradients(Reducing):
    """BUG: gradients that never came are not noticed; the next iteration begins as if nothing had happened."""

    class OwnReducer(Reducer):
        """Forgets the iteration instead of raising."""

        def check_finished(self) -> None:
            """Forget it."""
            if self.state.is_unfinished:
                self.state.handle(Event.RESET)
                self._in_flight.clear()
                self.arrivals.disarm()


class DelaysNothing(DistributedDataParallel):
    """BUG: parameters that were to be delayed are reduced with all others."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._options = dataclasses.replace(self._options, delayed=frozenset())
        super()._attach_reducer(members)


class LeavesDelayedLocal(Reducing):
    """BUG: delayed gradients are put off for ever."""

    class OwnReducer(Reducer):
        """Does not send the delayed."""

        def _launch(self, bucket: Bucket) -> None:
            if not any(self.specs[member.index].delayed for member in bucket.members):
                super()._launch(bucket)


class CountsOldGradientsTwice(Reducing):
    """BUG: a gradient that was there before the backward is counted twice."""

    class OwnReducer(Reducer):
        """Adds what was there."""

        def _arm(self, reachable: set[int] | None) -> None:
            super()._arm(reachable)
            self._before = [_copy_of(member.parameter.grad) for member in self.members]

        def _finalize(self) -> None:
            super()._finalize()
            for member, before in zip(self.members, self._before, strict=True):
                if before is not None and member.parameter.grad is not None and not before.is_sparse:
                    member.parameter.grad.add_(before)


def _copy_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


class CountsOneRankTwice(Reducing):
    """BUG: sums are divided by one more than there are ranks."""

    class OwnReducer(Reducer):
        """Miscounts."""

        def _launch(self, bucket: Bucket) -> None:
            self.divisor = self.group.size() + 1
            super()._launch(bucket)


class KeepsHooks(Reducing):
    """BUG: hooks stay on the parameters when they are to be removed."""

    class OwnReducer(Reducer):
        """Holds on."""

        def remove_hooks(self) -> None:
            """Do nothing."""


class ResetKeepsDivisor(Reducing):
    """BUG: after `_update_process_group` sums are divided by the size of the old group."""

    class OwnReducer(Reducer):
        """Keeps its divisor."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Take the new group and the old divisor."""
            divisor = self.divisor
            super().reset(group)
            self.divisor = divisor


class ResetKeepsIteration(Reducing):
    """BUG: `_update_process_group` takes the new group, and does not forget an unfinished backward."""

    class OwnReducer(Reducer):
        """Changes the group and nothing else."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Take the new group."""
            self.group = group
            self.divisor = dist.get_world_size(group)
            self.state.rank = dist.get_rank(group)


class ResetDropsGradients(Reducing):
    """BUG: `_update_process_group` throws away what was accumulated under `no_sync`."""

    class OwnReducer(Reducer):
        """Clears too much."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Take the new group and drop gradients."""
            super().reset(group)
            for member in self.members:
                member.parameter.grad = None


class AgreesOnNewGroup(Reducing):
    """BUG: `_update_process_group` communicates, which ranks that come later do not answer."""

    class OwnReducer(Reducer):
        """Asks around."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Take the new group and tell everybody in it."""
            super().reset(group)
            collectives.all_reduce_now(torch.zeros(1), group)


class FirstOutputOnly(Reducing):
    """BUG: backward is noticed through the first tensor of the output only."""

    class OwnReducer(Reducer):
        """Looks at one output."""

        def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
            """Forget all outputs but the first."""
            self.reach.is_walked = True
            super().prepare_for_backward(list(outputs)[:1])
            self.reach.is_announced = False

        def _is_welcome_late(self, index: int) -> bool:
            return False
