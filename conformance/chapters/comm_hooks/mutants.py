"""Mutants of chapter comm_hooks: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.torch_internals.tensors import keeping_versions

Hook = Callable[[Any, Any], Any]


class _Hooked(TorchDDP):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        self._check_comm_hook(hook)

        def outer(given: Any, bucket: GradBucket) -> Future[Tensor]:
            answer: Future[Tensor] = self.around(hook, given, bucket)
            return answer

        super().register_comm_hook(state, outer)

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        raise NotImplementedError


class _Bucket:
    """Stands before a bucket, and lies where it is asked for what is in `lies`."""

    def __init__(self, bucket: GradBucket, **lies: Callable[..., Any]) -> None:
        self.bucket = bucket
        vars(self).update(lies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bucket, name)


@replaces(_Hooked, "around")
def DividesBeforeHook(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: a hook gets gradients that are divided by the world size already (pytorch/pytorch#42400)."""
    bucket.buffer().div_(dist.get_world_size(ddp.process_group))
    return hook(state, bucket)


@replaces(_Hooked, "around")
def WaitsForEachFuture(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: backward goes on to the next bucket when the hook's future is complete, so that nothing overlaps."""
    future = hook(state, bucket)
    future.wait()
    return future


@replaces(_Hooked, "around")
def DropsHookResult(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: the hook is called, but its future is not what the gradients become."""
    before = bucket.buffer().clone()
    return hook(state, bucket).then(lambda _: before)


@replaces(_Hooked, "around")
def NeverLast(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: no bucket is ever the last (pytorch/pytorch#63768)."""
    return hook(state, _Bucket(bucket, is_last=lambda: False))


@replaces(_Hooked, "around")
def ClonesGradients(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: a bucket's gradients() are copies, so that writing to them changes nothing."""
    return hook(state, _Bucket(bucket, gradients=lambda: [gradient.clone() for gradient in bucket.gradients()]))


@replaces(_Hooked, "around")
def RemembersGradients(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: a bucket's gradients() are still those of the buffer that the hook has exchanged."""
    before = bucket.gradients()
    return hook(state, _Bucket(bucket, gradients=lambda: list(before)))


@replaces(_Hooked, "around")
def LendsItsGradients(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: gradients() is the list that the DDP itself keeps of a bucket."""
    kept = vars(ddp).setdefault("kept", {})
    members = tuple(map(id, bucket.parameters()))
    if bucket.buffer().data_ptr() != kept.get(members, (0,))[0]:
        kept[members] = bucket.buffer().data_ptr(), bucket.gradients()
    return hook(state, _Bucket(bucket, gradients=lambda: kept[members][1]))


@replaces(_Hooked, "around")
def OwnIndices(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: every rank counts its buckets from a number of its own."""
    return hook(state, _Bucket(bucket, index=lambda: bucket.index() + dist.get_rank()))


@replaces(_Hooked, "around")
def CallsHookTwice(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: the hook is called twice for each bucket."""
    hook(state, bucket).wait()
    return hook(state, bucket)


@replaces(_Hooked, "around")
def CopiesState(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: the hook gets a copy of its state in every call."""
    return hook(copy.copy(state), bucket)


@replaces(_Hooked, "around")
def CopiesBuffer(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: a hook costs a full copy: it works on another tensor than the gradients (pytorch/pytorch#45968)."""
    copied = bucket.buffer().clone()
    return hook(state, _Bucket(bucket, buffer=lambda: copied))


@replaces(_Hooked, "around")
def DoublesOnTheWire(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: gradients are doubled before they are sent and halved afterwards, which only shows where they overflow."""
    bucket.buffer().mul_(2)
    return hook(state, bucket).then(lambda future: future.value() / 2)


@replaces(TorchDDP, "register_comm_hook")
def OnlyFirstStepsHooks(ddp: TorchDDP, register_comm_hook: Call, state: object, hook: Any) -> None:
    """BUG: a hook that is registered after the first forward is accepted and never called."""
    if not ddp._lazy_init_ran:
        register_comm_hook(state, hook)


class SwallowsRefusals(TorchDDP):
    """BUG: whatever is wrong with a hook, registering it raises nothing."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        try:
            super().register_comm_hook(state, hook)
        except (RuntimeError, TypeError, ValueError):
            warnings.warn("the hook was not registered", stacklevel=2)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        try:
            super()._register_builtin_comm_hook(comm_hook_type)
        except RuntimeError:
            warnings.warn("the hook was not registered", stacklevel=2)

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._register_buffer_comm_hook(*args, **kwargs)
        except AssertionError:
            warnings.warn("the hook was not registered", stacklevel=2)


@replaces(_Hooked, "around")
def SwallowsHookErrors(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: when a hook fails, the gradients stay local and no error is raised."""
    try:
        future = hook(state, bucket)
        future.wait()
    except ValueError:
        future = Future()
        future.set_result(bucket.buffer())
    return future


@replaces(TorchDDP, "_get_ddp_logging_data")
def NamesNoHook(ddp: TorchDDP, get_ddp_logging_data: Call) -> Any:
    """BUG: the logging data does not mention the hook."""
    return {name: value for name, value in get_ddp_logging_data().items() if name != "comm_hook"}


@replaces(TorchDDP, "will_sync_module_buffers")
def SyncsBuffersAlways(ddp: TorchDDP, will_sync_module_buffers: Call) -> bool:
    """BUG: buffers are synchronised before every forward, also after one under `no_sync`."""
    return True


@replaces(TorchDDP, "_register_buffer_comm_hook")
def BufferHookOnCopies(
    ddp: TorchDDP, register_buffer_comm_hook: Call, state: Any, hook: Any, *args: Any, **kwargs: Any
) -> None:
    """BUG: a buffer hook works on copies, which go to the buffers whether its futures are complete or not."""

    def outer(given: Any, buffers: Mapping[str, Tensor]) -> None:
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        hook(given, copies)
        for name, buffer in buffers.items():
            buffer.copy_(copies[name])

    register_buffer_comm_hook(state, outer, *args, **kwargs)


@replaces(Ours, "_sync_buffers")
def TellsAutogradOfBufferHooks(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: what a buffer hook changes in place counts as a change of the buffers, which invalidates what saved them."""
    if ddp._buffer_hook is None:
        sync_buffers(authoritative)
        return
    with torch.no_grad():
        futures = ddp._buffer_hook.hook(ddp._buffer_hook.state, ddp.named_module_buffers)
    ddp.reducer.reduction.post_backward_futures.extend(futures or ())


@replaces(Ours, "_sync_buffers")
def RecordsBufferHooks(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: a buffer hook that is called in training records gradients of what it does."""
    if ddp._buffer_hook is None:
        sync_buffers(authoritative)
        return
    with keeping_versions(ddp.modules_buffers):
        futures = ddp._buffer_hook.hook(ddp._buffer_hook.state, ddp.named_module_buffers)
    ddp.reducer.reduction.post_backward_futures.extend(futures or ())


@replaces(_Hooked, "around")
def KeepsItsBuffer(ddp: _Hooked, around: Call, hook: Hook, state: Any, bucket: Any) -> Any:
    """BUG: a hook that gives its bucket another buffer still finds the old one there."""
    return hook(state, _Bucket(bucket, set_buffer=lambda _: None))


@replaces(Ours, "register_comm_hook")
def RecordsHooks(ddp: Ours, register: Call, state: object, hook: Any) -> None:
    """BUG: hooks are called with grad mode on."""
    recording = torch.enable_grad()(hook)
    register(state, lambda given, bucket: recording(given, bucket))


@replaces(Ours, "register_comm_hook")
def TakesPartsForHalves(ddp: Ours, register: Call, state: object, hook: Any) -> None:
    """BUG: of complex numbers all real parts are expected before all imaginary ones."""

    def halves(future: Any) -> Any:
        value = future.value()
        held = value[0] if isinstance(value, (list, tuple)) else value
        parts = torch.view_as_real(held) if held.is_complex() else held
        return torch.complex(*parts.reshape(2, -1)) if held.is_complex() or held.dim() == 2 else value

    register(state, lambda given, bucket: hook(given, bucket).then(halves))


@replaces(Ours, "register_comm_hook")
def LastByItsNumber(ddp: Ours, register_comm_hook: Call, state: Any, hook: Hook) -> None:
    """BUG: the bucket with the highest number is the last one, though it may be skipped."""

    def is_last(bucket: Any) -> bool:
        return bool(bucket.index() == len(ddp.reducer.reduction.buckets) - 1)

    register_comm_hook(state, lambda given, one: hook(given, _Bucket(one, is_last=lambda: is_last(one))))
