"""Mutants of chapter gradients: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddp_impl.autograd.marks
from conformance.errors import present
from conformance.mutants.bases import ActsAfterBackward, NothingToWaitFor, summed, with_options
from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api import distributed
from ddp_impl.autograd.hooks import AutogradHooks, GraphSearch
from ddp_impl.autograd.marks import Anchor
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.buckets.plan import BucketPlan
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.reducer.iteration import Event, Progress, Run
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.torch_internals.autograd import brought_by_backward
from ddp_impl.torch_internals.tensors import tensor_in_cpp
from ddp_impl.wire import collectives


@replaces(TorchDDP, "__init__")
def NoDivision(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: gradients are summed over the ranks and never divided by the world size."""
    init(*args, **kwargs)
    ddp.register_comm_hook(ddp.process_group, summed)


@replaces(Reduction, "launch")
def SumsInViews(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: with `gradient_as_bucket_view` gradients are summed and never divided."""
    if reduction.options.gradient_as_bucket_view:
        reduction.divisor = 1
    launch(bucket)


@replaces(Ours, "attach_reducer")
def LosesBatchedCopies(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: with `batched_grad_copy` the first gradient of the batch is lost."""
    kept = members[1:] if ddp.batched_grad_copy else members
    attach_reducer([dataclasses.replace(member, index=index) for index, member in enumerate(kept)])


@replaces(Ours, "_post_forward")
def DropsTensorHooks(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: hooks that a user registered on a parameter are gone after the first forward."""
    for parameter in ddp.module.parameters():
        if parameter._backward_hooks:
            parameter._backward_hooks.clear()
    return post_forward(output)


@replaces(Reduction, "launch")
def RefusesGraphs(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: `backward(create_graph=True)` raises."""
    if any(parameter.grad is not None and parameter.grad.requires_grad for parameter in bucket.parameters):
        raise RuntimeError("gradients must not require gradients")
    launch(bucket)


@replaces(Reduction, "launch")
def KeepsGraphsOfGradients(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: gradients stay alive when they have been averaged, and with `create_graph=True` their graphs."""
    _kept_gradients.append([parameter.grad for parameter in bucket.parameters])
    launch(bucket)


_kept_gradients: list[list[Tensor | None]] = []


@replaces(Reducer, "begin_backward")
def OneBackwardPerForward(reducer: Reducer, begin_backward: Call) -> None:
    """BUG: a second backward through the same outputs leaves local gradients, and says nothing."""
    if reducer.reduction.iteration.progress is not Progress.IDLE:
        begin_backward()


@as_part
class AnyBackwardCounts(Reducer):
    """BUG: `torch.autograd.grad` between forward and backward uses up the reduction."""

    def begin_backward(self) -> None:
        if self.reduction.iteration.progress is not Progress.IDLE:
            super().begin_backward()

    def backward_ends(self) -> None:
        iteration = self.reduction.iteration
        if iteration.progress is Progress.AWAITS and iteration.run is Run.RUNS:
            iteration.enter(Event.RESET)
            self.arrivals.disarm()
        super().backward_ends()


@replaces(Ours, "_post_forward")
def GivesFrozenGradients(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: frozen parameters get gradients of zeros."""
    for parameter in ddp.module.parameters():
        if not parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return post_forward(output)


@replaces(Ours, "_set_ddp_sink_clone")
def RefusesSinkClone(ddp: Ours, set_ddp_sink_clone: Call, val: bool) -> None:
    """BUG: `_set_ddp_sink_clone` raises."""
    raise NotImplementedError("there is no sink")


@replaces(Reduction, "send")
def LeavesOutTheLastElement(reduction: Reduction, send: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: off by one, the last element of each bucket is not sent."""
    send(bucket, buffer if bucket.sparse or reduction.comm_hook is not None else buffer[:-1])


@replaces(Reducer, "finalize")
def DoesNotWait(reducer: Any, finalize: Call) -> None:
    """BUG: backward returns while the last all-reduce may still be in flight."""
    last = max(reducer.reduction.iteration.in_flight, default=-1)
    if reducer.reduction.comm_hook is None and last >= 0:
        buffer, work = reducer.reduction.iteration.in_flight[last]
        reducer.unwaited = work
        reducer.reduction.iteration.in_flight[last] = (buffer, NothingToWaitFor())
    finalize()


@replaces(Reduction, "launch")
def SumsSparse(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: sparse gradients are summed and never divided."""
    divisor = reduction.divisor
    reduction.divisor = 1 if bucket.sparse else divisor
    launch(bucket)
    reduction.divisor = divisor


@replaces(Reducer, "finalize")
def ReplacesGradients(reducer: Reducer, finalize: Call) -> None:
    """BUG: the mean is put into `.grad` as a new tensor, and what the user holds keeps the local gradient."""
    held = [(member.parameter, member.parameter.grad) for member in reducer.members]
    before = [None if gradient is None else gradient.clone() for _, gradient in held]
    finalize()
    for (parameter, gradient), local in zip(held, before, strict=True):
        if gradient is not None and local is not None and gradient is parameter.grad and not gradient.is_sparse:
            parameter.grad = gradient.clone()
            gradient.copy_(local)


@replaces(Reducer, "finalize")
def PacksGradients(reducer: Reducer, finalize: Call) -> None:
    """BUG: a gradient that lies otherwise than its parameter is packed anew."""
    finalize()
    for member in reducer.members:
        gradient = member.parameter.grad
        if gradient is not None and gradient.layout == torch.strided and not gradient.is_contiguous():
            member.parameter.grad = torch.empty_like(member.parameter).copy_(gradient)


@replaces(Reducer, "finalize")
def MakesDense(reducer: Reducer, finalize: Call) -> None:
    """BUG: a sparse gradient becomes dense."""
    finalize()
    for member in reducer.members:
        gradient = member.parameter.grad
        if gradient is not None and gradient.is_sparse:
            member.parameter.grad = gradient.to_dense()


@replaces(Ours, "__init__")
def ReducesInSinglePrecision(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: whatever their dtype, gradients are averaged in float32."""
    with with_options(reduce_dtype=torch.float32):
        init(*args, **kwargs)


@replaces(Reduction, "hand_out")
def SumsComplexDoubles(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: gradients in complex128 are summed and never divided."""
    if buffer.dtype == torch.complex128:
        buffer.mul_(reduction.divisor)
    hand_out(bucket, buffer, used)


@replaces(Reduction, "send")
def RoundsComplexDoubles(reduction: Reduction, send: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: gradients in complex128 are sent in complex64."""
    if buffer.dtype == torch.complex128:
        buffer.copy_(buffer.to(torch.complex64))
    send(bucket, buffer)


@replaces(Reduction, "hand_out")
def SumsVolumes(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: a parameter of five dimensions keeps the sum over the ranks."""
    for parameter, view in zip(bucket.parameters, bucket.views, strict=False):
        if parameter.dim() == 5:
            view.mul_(reduction.divisor)
    hand_out(bucket, buffer, used)


@replaces(BucketPlanning, "adopt")
def LosesGradientsInRebuilding(planning: BucketPlanning, adopt: Call, plan: BucketPlan) -> None:
    """BUG: when buckets are rebuilt, gradients that lived in the old ones are lost."""
    adopt(plan)
    for bucket in planning.reduction.buckets:
        bucket.flat.zero_()


@as_part
class CountsOldGradientsTwice(Reducer):
    """BUG: a gradient that was there before the backward is counted twice."""

    def open_iteration(self) -> None:
        super().open_iteration()
        self._before = [_copy_of(member.parameter.grad) for member in self.members]

    def finalize(self) -> None:
        super().finalize()
        for member, before in zip(self.members, self._before, strict=True):
            if before is not None and member.parameter.grad is not None and not before.is_sparse:
                member.parameter.grad.add_(before)


def _copy_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


@replaces(Reduction, "launch")
def CountsOneRankTwice(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: sums are divided by one more than there are ranks."""
    reduction.divisor = reduction.group.size() + 1
    launch(bucket)


@replaces(ActsAfterBackward, "after_reduced")
def DifferentBits(ddp: ActsAfterBackward, after_reduced: Call) -> None:
    """BUG: the last rank rounds differently, so that replicas drift apart by an ulp per step."""
    if ddp.process_group.rank() == ddp.process_group.size() - 1:
        for parameter in ddp.module.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(torch.nextafter(parameter.grad, torch.full_like(parameter.grad, torch.inf)))


@replaces(ActsAfterBackward, "after_reduced")
def AddsToZeros(ddp: ActsAfterBackward, after_reduced: Call) -> None:
    """BUG: sums begin with 0.0, so that -0.0 on all ranks becomes 0.0."""
    for parameter in ddp.module.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(0.0)


@replaces(ActsAfterBackward, "after_reduced")
def ContiguousGradients(ddp: ActsAfterBackward, after_reduced: Call) -> None:
    """BUG: gradients are contiguous whatever the strides of their parameters."""
    for parameter in ddp.module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()


@replaces(ActsAfterBackward, "after_reduced")
def ContiguousVolumes(ddp: ActsAfterBackward, after_reduced: Call) -> None:
    """BUG: gradients of five dimensions are contiguous whatever the strides of their parameters."""
    for parameter in ddp.module.parameters():
        if parameter.grad is not None and parameter.dim() == 5:
            parameter.grad = parameter.grad.contiguous()


@replaces(ActsAfterBackward, "after_reduced")
def Warns(ddp: ActsAfterBackward, after_reduced: Call) -> None:
    """BUG: every backward warns."""
    warnings.warn("Grad strides do not match bucket view strides.", stacklevel=1)


@replaces(TorchDDP, "__init__")
def NeverViews(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: `gradient_as_bucket_view` saves nothing."""
    init(*args, **{**kwargs, "gradient_as_bucket_view": False})


@replaces(TorchDDP, "__init__")
def AlwaysViews(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: gradients are views of buckets for every user."""
    init(*args, **{**kwargs, "gradient_as_bucket_view": True})


@replaces(TorchDDP, "__init__")
def SwallowsNan(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: NaN and infinities are replaced before they are sent."""
    init(*args, **kwargs)
    ddp.register_comm_hook(ddp.process_group, _mean_of_numbers)


@replaces(TorchDDP, "__init__")
def DividesLast(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: gradients are summed first and divided afterwards, also where the sum does not fit the dtype."""
    init(*args, **kwargs)
    ddp.register_comm_hook(ddp.process_group, _sum_then_divide)


def _mean_of_numbers(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    bucket.buffer().nan_to_num_().div_(group.size())
    return summed(group, bucket)


def _sum_then_divide(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    return summed(group, bucket).then(lambda future: future.value().div_(group.size()))


@replaces(Ours, "forward")
def ViewsOfOutputs(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: outputs pass through a function of autograd that gives views, which may not be changed in place."""
    output = forward(*inputs, **kwargs)
    return _Views.apply(output)[0] if isinstance(output, Tensor) and output.requires_grad else output


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return output.view_as(output), output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@replaces(ParameterWatch, "check")
def WatchesNoParameters(watch: ParameterWatch, check: Call, /, *, allow_removed: bool = False) -> bool:
    """BUG: a parameter that was replaced after wrapping goes unnoticed."""
    return False


@replaces(ParameterWatch, "is_replaced")
def IsSilentOfWhatIsFrozen(watch: ParameterWatch, is_replaced: Call, name: str, present: Mapping[str, Tensor]) -> bool:
    """BUG: with find_unused_parameters, a replaced parameter goes unnoticed where the new one is frozen."""
    return False


@replaces(ParameterWatch, "check")
def NoticesNoSwap(watch: ParameterWatch, check: Call, /, *, allow_removed: bool = False) -> Any:
    """BUG: a parameter that is another tensor in C++ now, without our hook, goes unnoticed."""
    watch.in_cpp = list(map(tensor_in_cpp, watch.parameters))
    return check(allow_removed=allow_removed)


@replaces(Reduction, "collect")
def KeepsMovedViews(reduction: Reduction, collect: Call, bucket: Bucket) -> Any:
    """BUG: gradients that live in buckets count as being there, although a conversion has given them other memory."""
    with mock.patch.object(Bucket, "restore_views"):
        return collect(bucket)


@replaces(Reduction, "is_frozen")
def WaitsForFrozen(reduction: Reduction, is_frozen: Call, index: int) -> bool:
    """BUG: the reducer waits for gradients of parameters that the user has frozen since wrapping."""
    return False


@replaces(ParameterWatch, "is_stranger")
def WatchesItsOwnOnly(watch: ParameterWatch, is_stranger: Call, name: str, parameter: Tensor) -> bool:
    """BUG: parameters that the module trains and DDP was not given go unnoticed."""
    return False


@replaces(ParameterWatch, "remember")
def RefusesEveryChange(watch: ParameterWatch, remember: Call) -> None:
    """BUG: a wrapped module must not change at all."""
    raise RuntimeError("the module has changed since it was wrapped; wrap it anew")


@replaces(ParameterWatch, "warn_about")
def KeepsQuietAboutStandIns(watch: ParameterWatch, warn_about: Call, stand_ins: Mapping[str, Tensor]) -> None:
    """BUG: no warning says that tensors which stand in for parameters keep their gradients."""


@replaces(Reduction, "launch")
def ReducesSharedMemory(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: a large gradient is reduced where it is, also where another one is in the same place."""
    with mock.patch("ddp_impl.buckets.gradients.owns_its_memory", return_value=True):
        launch(bucket)


@replaces(Reduction, "send")
def SendsHalfOfALargeBucket(reduction: Reduction, send: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: of a bucket with more than 60,000 elements, only so many are sent."""
    send(bucket, buffer if reduction.comm_hook is not None or bucket.sparse else buffer[:60_000])


@replaces(Reduction, "collect")
def DividesWhatHasMovedTwice(reduction: Reduction, collect: Call, bucket: Bucket) -> Any:
    """BUG: a gradient that moved into its bucket on arrival is divided then, and with the bucket again."""
    for parameter, view in zip(bucket.parameters, bucket.views, strict=False):
        if bucket.has_large and parameter.grad is view:
            view.div_(reduction.divisor)
    return collect(bucket)


@replaces(Reduction, "collect")
def MultipliesByZero(reduction: Reduction, collect: Call, bucket: Bucket) -> Any:
    """BUG: in the place of a gradient that is missing, what the bucket held before is multiplied by 0."""
    with mock.patch("ddp_impl.buckets.gradients.foreach_zero_", lambda places: torch._foreach_mul_(places, 0)):
        return collect(bucket)


@replaces(Reduction, "send_zeros")
def JoinMultipliesByZero(reduction: Reduction, send_zeros: Call) -> None:
    """BUG: a rank that has joined contributes what its buckets held before, times 0."""
    with mock.patch.object(Tensor, "zero_", lambda buffer: buffer.mul_(0)):
        send_zeros()


class _AveragesWhatItRead(Reduction):
    read: dict[Tensor, Tensor]

    def collect(self, bucket: Bucket) -> Tensor:
        for parameter in bucket.parameters:
            read = self.read.pop(parameter, None)
            if read is not None and not torch.equal(read, present(parameter.grad)):
                parameter.grad = read
        return super().collect(bucket)


@replaces(as_part(_AveragesWhatItRead), "attach_reducer")
def ReadsGradientsAheadOfHooks(ddp: Any, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: gradients are read in hooks registered at construction: what later hooks of the user do is lost."""
    read: dict[Tensor, Tensor] = {}
    for member in members:
        member.parameter.register_post_accumulate_grad_hook(
            lambda parameter: read.update({parameter: present(parameter.grad).clone()})
        )
    attach_reducer(members)
    ddp.reducer.reduction.read = read


class NoSyncIsGlobal(Ours):
    """BUG: whether gradients are synchronised is one switch of all wrappers."""

    switch = [True]

    @property
    def require_backward_grad_sync(self) -> bool:  # type: ignore[override]
        return self.switch[0]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "require_backward_grad_sync":
            self.switch[0] = value
        else:
            super().__setattr__(name, value)


@as_part
class PoolsBuckets(Reduction):
    """BUG: buckets of all wrappers share memory, by place and size: two that reduce at a time overwrite each other."""

    pool: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def launch(self, bucket: Bucket) -> None:
        if not bucket.sparse and not bucket.holds_gradients:
            bucket.claim()
            key = bucket.index, bucket.flat.numel(), bucket.flat.dtype
            bucket.flat = self.pool.setdefault(key, bucket.flat)
            bucket.views = bucket.views_into(bucket.flat)
        super().launch(bucket)


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
        raise NotImplementedError


@replaces(_ReducesOneByOne, "key")
def ReducesByName(ddp: _ReducesOneByOne, key: Call, name: str, parameter: Tensor) -> str | int:
    """BUG: gradients are reduced in the order of a set of names, which is another one in each process."""
    return name


@replaces(_ReducesOneByOne, "key")
def ReducesByAddress(ddp: _ReducesOneByOne, key: Call, name: str, parameter: Tensor) -> str | int:
    """BUG: gradients are reduced in the order of a set of parameters, which is another one in each process."""
    return hash(parameter)


@replaces(Reduction, "collect")
def ReadsMemoryAlone(reduction: Reduction, collect: Call, bucket: Bucket) -> Any:
    """BUG: of a gradient that is conjugated or negated by a bit, what is in memory is averaged, without the bit."""
    for parameter in bucket.parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_neg():
            parameter.grad = torch._neg_view(gradient)
        elif gradient is not None and gradient.is_conj():
            parameter.grad = gradient.conj()
    return collect(bucket)


@replaces(Ours, "attach_reducer")
def ForgetsItsOutputs(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: once the wrapper is dropped, the gradients of its outputs stay local."""
    attach_reducer(members)
    weakref.finalize(ddp, ddp.reducer.remove_hooks)


@replaces(Ours, "attach_reducer")
def AveragesForItsOutputs(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: while an output of a dropped wrapper is left, other backwards of the module are averaged, too."""
    with mock.patch.object(Reducer, "wrapper_collected"):
        attach_reducer(members)


@replaces(Ours, "_pre_forward")
def ExchangesWithinTransforms(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: what ranks exchange before a forward, and the buckets made there, belong to the transform around it."""
    with mock.patch.object(distributed, "outside_transforms", contextlib.nullcontext):
        return pre_forward(*inputs, **kwargs)


@replaces(Ours, "_pre_forward")
def PostponesWithinTransforms(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a rank that is within a function transform keeps its buckets, while other ranks make new ones."""
    is_transformed = torch._C._are_functorch_transforms_active()
    with mock.patch.object(ddp.reducer.planning, "rebuild") if is_transformed else contextlib.nullcontext():
        return pre_forward(*inputs, **kwargs)


@replaces(GraphSearch, "uses_any")
def LooksForNodesWithinTransforms(search: GraphSearch, uses_any: Call, outputs: Iterable[Tensor]) -> Any:
    """BUG: within a function transform an output that is a parameter is asked for its node, which it has not there."""
    tensors = list(outputs)
    for leaf in [tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is None]:
        get_gradient_edge(leaf)
    return uses_any(tensors)


@replaces(Anchor, "tie")
def TiesWithinTransforms(anchor: Anchor, tie: Call, *arguments: Any) -> Any:
    """BUG: what ties an output that uses no parameter belongs to the function transform around the forward."""
    with mock.patch.object(ddp_impl.autograd.marks, "outside_transforms", contextlib.nullcontext):
        return tie(*arguments)


@replaces(Anchor, "tie")
def TiesApart(anchor: Anchor, tie: Call, *arguments: Any) -> Any:
    """BUG: an output that uses no parameter is tied apart from what shares its memory, as far as autograd knows."""
    with mock.patch.object(ddp_impl.autograd.marks, "owner_in_graph", return_value=None):
        return tie(*arguments)


@replaces(Ours, "_post_forward")
def MarksApart(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: beside another wrapper an output is marked apart from what shares its memory, as far as autograd knows."""
    with mock.patch.object(distributed, "marked", _marked_apart):
        return post_forward(output)


def _marked_apart(output: Any, tensors: Sequence[Tensor], since: int) -> Any:
    with mock.patch.object(ddp_impl.autograd.marks, "owner_in_graph", return_value=None):
        return ddp_impl.autograd.marks.marked(output, tensors, since)


@replaces(Ours, "_post_forward")
def MarksWhatWasThere(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: beside another wrapper, what forward took and returns gets a mark, apart from earlier uses of it."""
    marked = ddp_impl.autograd.marks.marked
    with mock.patch.object(distributed, "marked", lambda value, tensors, _: marked(value, tensors, 0)):
        return post_forward(output)


@replaces(Ours, "_post_forward")
def TakesHooksAway(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: beside another wrapper a view that forward returns is viewed again, without the hooks on it."""
    with mock.patch.object(ddp_impl.autograd.marks, "is_more_than_a_view", return_value=False):
        return post_forward(output)


@replaces(Ours, "_post_forward")
def GivesZerosForNone(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: beside another wrapper, an output that gets no gradient hands zeros on."""
    with mock.patch.object(ddp_impl.autograd.marks.Identity, "forward", staticmethod(_materializing)):
        return post_forward(output)


_identity = ddp_impl.autograd.marks.Identity.forward


def _materializing(ctx: Any, *arguments: Any) -> Tensor:
    output = _identity(ctx, *arguments)
    ctx.set_materialize_grads(True)
    return output


@replaces(Reducer, "begins_with_others")
def BeginsWithoutItsWrapper(reducer: Reducer, begins_with_others: Call, repeated: int | None) -> Any:
    """BUG: beside another wrapper, a dropped one takes a backward of the bare module for its outputs'."""
    reduction, now = reducer.reduction, reducer.reduction.iteration
    awaits = now.progress is Progress.AWAITS and now.run is not Run.RUNS and not reduction.follows_local
    nodes = reducer.hooks.unshared(reduction.graph.nodes) if awaits else ()
    return begins_with_others(repeated) or any(brought_by_backward(nodes))


@replaces(AutogradHooks, "on_backward")
def ListensForEachForward(hooks: AutogradHooks, on_backward: Call, *arguments: Any, **options: Any) -> Any:
    """BUG: every forward puts another hook on a graph that was there before."""
    return on_backward(*arguments, **{**options, "since": 0})


@replaces(Reduction, "send")
def OverlapsSparseSums(reduction: Reduction, send: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: a sum of sparse gradients overlaps with others."""
    with mock.patch.object(collectives, "all_reduce_sum", _begun) if bucket.sparse else contextlib.nullcontext():
        send(bucket, buffer)


def _begun(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return group.allreduce([buffer], options)


@replaces(Reduction, "hand_out")
def KeepsTheLayoutOfWrapping(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: a gradient is laid out as its parameter was when it was wrapped, whatever the user has made of it since."""
    hand_out(bucket, buffer, used)
    for member in bucket.members:
        gradient = member.parameter.grad
        if gradient is not None and not bucket.sparse and gradient.stride() != member.layout.stride:
            old = torch.empty_strided(member.layout.shape, member.layout.stride, dtype=gradient.dtype)
            member.parameter.grad = old.copy_(gradient)


@replaces(Reduction, "hand_out")
def RoundsSparseAverages(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: averages of sparse gradients have no more digits than float32."""
    if bucket.sparse:
        buffer._values().copy_(buffer._values().float())
    hand_out(bucket, buffer, used)


@replaces(TorchDDP, "__init__")
def AveragesBareBackwards(ddp: TorchDDP, init: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
    """BUG: every forward of the module awaits a backward to be averaged, also one without the wrapper."""
    init(module, *args, **kwargs)
    wrapper = weakref.ref(ddp)

    def arm(*_: Any) -> None:
        if (alive := wrapper()) is not None and alive.require_backward_grad_sync and torch.is_grad_enabled():
            alive.reducer.prepare_for_backward([])

    module.register_forward_hook(arm)


@replaces(Ours, "attach_reducer")
def KnowsNoBags(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: of a table whose rows are added up, `nn.EmbeddingBag`, no sparse gradient is expected."""
    tables = {one.weight for one in ddp.module.modules() if isinstance(one, nn.EmbeddingBag)}
    attach_reducer([dataclasses.replace(one, sparse=one.sparse and one.parameter not in tables) for one in members])
