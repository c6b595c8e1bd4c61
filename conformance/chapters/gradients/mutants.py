"""Mutants of chapter gradients: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.bases import ActsAfterBackward, NothingToWaitFor, Reducing, summed
from conformance.own_mistake import present
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.bucket_plan import BucketPlan
from ddp_impl.parameter_watch import ParameterWatch
from ddp_impl.reducer import Reducer
from ddp_impl.reducer_state import Event, Phase


class NoDivision(TorchDDP):
    """BUG: gradients are summed over the ranks and never divided by the world size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, summed)


class SumsInViews(Reducing):
    """BUG: with `gradient_as_bucket_view` gradients are summed and never divided."""

    class OwnReducer(Reducer):
        """Forgets to divide."""

        def _launch(self, bucket: Bucket) -> None:
            if self.options.gradient_as_bucket_view:
                self.divisor = 1
            super()._launch(bucket)


class LosesBatchedCopies(DistributedDataParallel):
    """BUG: with `batched_grad_copy` the first gradient of the batch is lost."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        kept = members[1:] if self.batched_grad_copy else members
        super()._attach_reducer([dataclasses.replace(member, index=index) for index, member in enumerate(kept)])


class DropsTensorHooks(DistributedDataParallel):
    """BUG: hooks that a user registered on a parameter are gone after the first forward."""

    def _post_forward(self, output: Any) -> Any:
        for parameter in self.module.parameters():
            if parameter._backward_hooks:
                parameter._backward_hooks.clear()
        return super()._post_forward(output)


class RefusesGraphs(Reducing):
    """BUG: `backward(create_graph=True)` raises."""

    class OwnReducer(Reducer):
        """Wants plain gradients."""

        def _launch(self, bucket: Bucket) -> None:
            if any(parameter.grad is not None and parameter.grad.requires_grad for parameter in bucket.parameters):
                raise RuntimeError("gradients must not require gradients")
            super()._launch(bucket)


class OneBackwardPerForward(Reducing):
    """BUG: a second backward through the same outputs leaves local gradients, and says nothing."""

    class OwnReducer(Reducer):
        """Begins with a forward only."""

        def _begin_backward(self) -> None:
            if self.state.phase is not Phase.IDLE:
                super()._begin_backward()


class AnyBackwardCounts(Reducing):
    """BUG: `torch.autograd.grad` between forward and backward uses up the reduction."""

    class OwnReducer(OneBackwardPerForward.OwnReducer):
        """Ends with every backward."""

        def backward_ends(self) -> None:
            """Forget the iteration."""
            if self.state.phase is Phase.RUNNING:
                self.state.handle(Event.RESET)
                self.arrivals.disarm()
            super().backward_ends()


class GivesFrozenGradients(DistributedDataParallel):
    """BUG: frozen parameters get gradients of zeros."""

    def _post_forward(self, output: Any) -> Any:
        for parameter in self.module.parameters():
            if not parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super()._post_forward(output)


class RefusesSinkClone(DistributedDataParallel):
    """BUG: `_set_ddp_sink_clone` raises."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        raise NotImplementedError("there is no sink")


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
            last = max(self.iteration.in_flight, default=-1)
            if self.comm_hook is None and last >= 0:
                buffer, work = self.iteration.in_flight[last]
                self.unwaited = work
                self.iteration.in_flight[last] = (buffer, NothingToWaitFor())
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


class SumsComplexDoubles(Reducing):
    """BUG: gradients in complex128 are summed and never divided."""

    class OwnReducer(Reducer):
        """Undoes the division."""

        def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Any) -> None:
            if buffer.dtype == torch.complex128:
                buffer.mul_(self.divisor)
            super()._hand_out(bucket, buffer, used)


class RoundsComplexDoubles(Reducing):
    """BUG: gradients in complex128 are sent in complex64."""

    class OwnReducer(Reducer):
        """Rounds what it sends."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            if buffer.dtype == torch.complex128:
                buffer.copy_(buffer.to(torch.complex64))
            super()._start(bucket, buffer)


class SumsVolumes(Reducing):
    """BUG: a parameter of five dimensions keeps the sum over the ranks."""

    class OwnReducer(Reducer):
        """Undoes the division."""

        def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Any) -> None:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=False):
                if parameter.dim() == 5:
                    view.mul_(self.divisor)
            super()._hand_out(bucket, buffer, used)


class LosesGradientsInRebuilding(Reducing):
    """BUG: when buckets are rebuilt, gradients that lived in the old ones are lost."""

    class OwnReducer(Reducer):
        """Empties new buckets."""

        def _adopt(self, plan: BucketPlan) -> None:
            super()._adopt(plan)
            for bucket in self.buckets:
                bucket.flat.zero_()


class CountsOldGradientsTwice(Reducing):
    """BUG: a gradient that was there before the backward is counted twice."""

    class OwnReducer(Reducer):
        """Adds what was there."""

        def _arm(self) -> None:
            super()._arm()
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


class DifferentBits(ActsAfterBackward):
    """BUG: the last rank rounds differently, so that replicas drift apart by an ulp per step."""

    def after_reduced(self) -> None:
        """Change every gradient by an ulp."""
        if self.process_group.rank() == self.process_group.size() - 1:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(torch.nextafter(parameter.grad, torch.full_like(parameter.grad, torch.inf)))


class ContiguousGradients(ActsAfterBackward):
    """BUG: gradients are contiguous whatever the strides of their parameters."""

    def after_reduced(self) -> None:
        """Make gradients contiguous."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()


class ContiguousVolumes(ActsAfterBackward):
    """BUG: gradients of five dimensions are contiguous whatever the strides of their parameters."""

    def after_reduced(self) -> None:
        """Make them contiguous."""
        for parameter in self.module.parameters():
            if parameter.grad is not None and parameter.dim() == 5:
                parameter.grad = parameter.grad.contiguous()


class Warns(ActsAfterBackward):
    """BUG: every backward warns."""

    def after_reduced(self) -> None:
        """Warn."""
        warnings.warn("Grad strides do not match bucket view strides.", stacklevel=1)


class NeverViews(TorchDDP):
    """BUG: `gradient_as_bucket_view` saves nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "gradient_as_bucket_view": False})


class AlwaysViews(TorchDDP):
    """BUG: gradients are views of buckets for everybody."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "gradient_as_bucket_view": True})


class SwallowsNan(TorchDDP):
    """BUG: NaN and infinities are replaced before they are sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _mean_of_numbers)


class DividesLast(TorchDDP):
    """BUG: gradients are summed first and divided afterwards, also where the sum does not fit the dtype."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _sum_then_divide)


def _mean_of_numbers(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    bucket.buffer().nan_to_num_().div_(group.size())
    return summed(group, bucket)


def _sum_then_divide(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    return summed(group, bucket).then(lambda future: future.value().div_(group.size()))


class ViewsOfOutputs(DistributedDataParallel):
    """BUG: outputs come through a function of autograd that gives views, which nobody may change in place."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and give views of a lone output."""
        output = super().forward(*inputs, **kwargs)
        return _Views.apply(output)[0] if isinstance(output, Tensor) and output.requires_grad else output


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return output.view_as(output), output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class WatchesNoParameters(DistributedDataParallel):
    """BUG: nobody notices that a parameter was replaced after wrapping."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self._watch = mock.Mock()


class NoticesNoSwap(DistributedDataParallel):
    """BUG: a parameter that is another tensor in C++ now, without our hook, goes unnoticed."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self._watch._parameters, self._watch._in_cpp = [], []


class KeepsMovedViews(Reducing):
    """BUG: gradients that live in buckets count as being there, although a conversion has given them other memory."""

    class OwnReducer(Reducer):
        """Looks at no address."""

        def _collected(self, bucket: Bucket) -> Tensor:
            with mock.patch.object(Bucket, "restore_views"):
                return super()._collected(bucket)


class WaitsForFrozen(Reducing):
    """BUG: the reducer waits for gradients of parameters that the user has frozen since wrapping."""

    class OwnReducer(Reducer):
        """Knows of no frozen parameters."""

        def _is_frozen(self, index: int) -> bool:
            return False


class WatchesItsOwnOnly(DistributedDataParallel):
    """BUG: nobody notices that the module trains parameters that DDP was not given."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self._watch.__class__ = _WatchOfMembers


class _WatchOfMembers(ParameterWatch):
    def _is_stranger(self, name: str, parameter: Tensor) -> bool:
        return False


class RefusesEveryChange(DistributedDataParallel):
    """BUG: a wrapped module must not change at all."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self._watch.__class__ = _Immutable


class _Immutable(ParameterWatch):
    def _remember(self) -> None:
        if hasattr(self, "_tables"):
            raise RuntimeError("the module has changed since it was wrapped; wrap it anew")
        super()._remember()


class KeepsQuietAboutStandIns(DistributedDataParallel):
    """BUG: nobody says that tensors which stand in for parameters keep their gradients."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self._watch.__class__ = _Quiet


class _Quiet(ParameterWatch):
    def _warn_about(self, stand_ins: Mapping[str, Tensor]) -> None:
        pass


class ReducesSharedMemory(Reducing):
    """BUG: a large gradient is reduced where it is, also where another one is in the same place."""

    class OwnReducer(Reducer):
        """Takes all memory for its own."""

        def _launch(self, bucket: Bucket) -> None:
            with mock.patch("ddp_impl.gradients.owns_its_memory", return_value=True):
                super()._launch(bucket)


class SendsHalfOfALargeBucket(Reducing):
    """BUG: of a bucket with more than 60,000 elements, only so many are sent."""

    class OwnReducer(Reducer):
        """Has a counter that is too narrow."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            super()._start(bucket, buffer if self.comm_hook is not None or bucket.sparse else buffer[:60_000])


class DividesWhatHasMovedTwice(Reducing):
    """BUG: what moved into its bucket when it came is divided then, and with the bucket again."""

    class OwnReducer(Reducer):
        """Divides at both times."""

        def _collected(self, bucket: Bucket) -> Tensor:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=False):
                if bucket.has_large and parameter.grad is view:
                    view.div_(self.divisor)
            return super()._collected(bucket)


class MultipliesByZero(Reducing):
    """BUG: in the place of a gradient that is missing, what the bucket held before is multiplied by 0."""

    class OwnReducer(Reducer):
        """Takes products with 0 for zeros."""

        def _collected(self, bucket: Bucket) -> Tensor:
            with mock.patch("ddp_impl.gradients.foreach_zero_", lambda places: torch._foreach_mul_(places, 0)):
                return super()._collected(bucket)


class JoinMultipliesByZero(Reducing):
    """BUG: a rank that has joined contributes what its buckets held before, times 0."""

    class OwnReducer(Reducer):
        """Takes products with 0 for zeros."""

        def _contribute_zeros(self) -> None:
            with mock.patch.object(Tensor, "zero_", lambda buffer: buffer.mul_(0)):
                super()._contribute_zeros()


class ReadsGradientsAheadOfHooks(Reducing):
    """BUG: gradients are read in hooks registered at construction: what later hooks of the user do is lost."""

    class OwnReducer(Reducer):
        """Averages what it has read."""

        read: dict[Tensor, Tensor]

        def _collected(self, bucket: Bucket) -> Tensor:
            for parameter in bucket.parameters:
                read = self.read.pop(parameter, None)
                if read is not None and not torch.equal(read, present(parameter.grad)):
                    parameter.grad = read
            return super()._collected(bucket)

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        read: dict[Tensor, Tensor] = {}
        for member in members:
            member.parameter.register_post_accumulate_grad_hook(
                lambda parameter: read.update({parameter: present(parameter.grad).clone()})
            )
        super()._attach_reducer(members)
        self.reducer.read = read  # type: ignore[attr-defined]


class NoSyncIsGlobal(DistributedDataParallel):
    """BUG: whether gradients are synchronised is one switch of all wrappers."""

    switch = [True]

    @property
    def require_backward_grad_sync(self) -> bool:  # type: ignore[override]
        """The switch."""
        return self.switch[0]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "require_backward_grad_sync":
            self.switch[0] = value
        else:
            super().__setattr__(name, value)


class PoolsBuckets(Reducing):
    """BUG: buckets of all wrappers share memory, by place and size: two that reduce at a time overwrite each other."""

    class OwnReducer(Reducer):
        """Takes memory from a pool."""

        pool: dict[tuple[int, int, torch.dtype], Tensor] = {}

        def _launch(self, bucket: Bucket) -> None:
            if not bucket.sparse and not bucket.holds_gradients:
                bucket.claim()
                key = bucket.index, bucket.flat.numel(), bucket.flat.dtype
                bucket.flat = self.pool.setdefault(key, bucket.flat)
                bucket.views = bucket.views_into(bucket.flat)
            super()._launch(bucket)


class _ReducesOneByOne(TorchDDP):
    """Averages the gradients of a bucket one after the other, in the order of a set of what `key` returns."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        names = {parameter: name for name, parameter in module.named_parameters()}
        group = self.process_group

        def hook(_: object, bucket: GradBucket) -> Future[Tensor]:
            keys = [self.key(names[parameter], parameter) for parameter in bucket.parameters()]
            gradients = dict(zip(keys, bucket.gradients(), strict=True))
            for key in set(keys):
                dist.all_reduce(gradients[key], group=group)
            future: Future[Tensor] = Future()
            future.set_result(bucket.buffer().div_(group.size()))
            return future

        self.register_comm_hook(None, hook)

    def key(self, name: str, parameter: Tensor) -> str | int:
        """Return what stands for a parameter."""
        raise NotImplementedError


class ReducesByName(_ReducesOneByOne):
    """BUG: gradients are reduced in the order of a set of names, which is another one in each process."""

    def key(self, name: str, parameter: Tensor) -> str | int:
        """Return the name."""
        return name


class ReducesByAddress(_ReducesOneByOne):
    """BUG: gradients are reduced in the order of a set of parameters, which is another one in each process."""

    def key(self, name: str, parameter: Tensor) -> str | int:
        """Return the hash."""
        return hash(parameter)
