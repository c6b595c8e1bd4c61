"""Mutants of chapter comm_hooks: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import ddp_impl
from ddp_impl.torch_internals import keeping_versions

Hook = Callable[[Any, Any], Any]


class _Hooked(DistributedDataParallel):
    """Registers what `around` makes of a hook."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register the hook, wrapped up."""
        self._check_comm_hook(hook)

        def outer(given: Any, bucket: GradBucket) -> Future[Tensor]:
            answer: Future[Tensor] = self.around(hook, given, bucket)
            return answer

        super().register_comm_hook(state, outer)

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Call the hook."""
        return hook(state, bucket)


class _Bucket:
    """Stands before a bucket; what a class below defines is its lie."""

    def __init__(self, bucket: GradBucket) -> None:
        self.bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bucket, name)


class DividesBeforeHook(_Hooked):
    """BUG: a hook gets gradients that are divided by the world size already (pytorch/pytorch#42400)."""

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Divide, then call the hook."""
        bucket.buffer().div_(dist.get_world_size(self.process_group))
        return hook(state, bucket)


class DropsHookResult(_Hooked):
    """BUG: the hook is called, but its future is not what the gradients become."""

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Call the hook and return what was there before."""
        before = bucket.buffer().clone()
        return hook(state, bucket).then(lambda _: before)


class NeverLast(_Hooked):
    """BUG: no bucket is ever the last (pytorch/pytorch#63768)."""

    class Bucket(_Bucket):
        """Not the last."""

        def is_last(self) -> bool:
            """Deny it."""
            return False

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Hand out buckets that lie."""
        return hook(state, self.Bucket(bucket))


class ClonesGradients(_Hooked):
    """BUG: a bucket's gradients() are copies, so that writing to them changes nothing."""

    class Bucket(_Bucket):
        """A bucket of copies."""

        def gradients(self) -> list[Tensor]:
            """Return copies."""
            return [gradient.clone() for gradient in self.bucket.gradients()]

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Hand out buckets that lie."""
        return hook(state, self.Bucket(bucket))


class OwnIndices(_Hooked):
    """BUG: every rank counts its buckets from a number of its own."""

    class Bucket(_Bucket):
        """A bucket with another index."""

        def index(self) -> int:
            """Return an index that depends on the rank."""
            return self.bucket.index() + dist.get_rank()

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Hand out buckets that lie."""
        return hook(state, self.Bucket(bucket))


class CallsHookTwice(_Hooked):
    """BUG: the hook is called twice for each bucket."""

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Call the hook, and call it again."""
        hook(state, bucket).wait()
        return hook(state, bucket)


class CopiesState(_Hooked):
    """BUG: the hook gets a copy of its state in every call."""

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Copy the state."""
        return hook(copy.copy(state), bucket)


class CopiesBuffer(_Hooked):
    """BUG: a hook costs a full copy: it works on another tensor than the gradients (pytorch/pytorch#45968)."""

    class Bucket(_Bucket):
        """A bucket of another tensor."""

        def __init__(self, bucket: GradBucket) -> None:
            super().__init__(bucket)
            self.copied = bucket.buffer().clone()

        def buffer(self) -> Tensor:
            """Return the copy."""
            return self.copied

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Hand out buckets of copies."""
        return hook(state, self.Bucket(bucket))


class DoublesOnTheWire(_Hooked):
    """BUG: gradients are doubled before they are sent and halved afterwards, which only shows where they overflow."""

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Double, call the hook, halve."""
        bucket.buffer().mul_(2)
        return hook(state, bucket).then(lambda future: future.value() / 2)


class OnlyFirstStepsHooks(DistributedDataParallel):
    """BUG: a hook that is registered after the first forward is accepted and never called."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register it if nothing has happened yet."""
        if not self._lazy_init_ran:
            super().register_comm_hook(state, hook)


class SwallowsRefusals(DistributedDataParallel):
    """BUG: whatever is wrong with a hook, registering it raises nothing."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Try to register it."""
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


class SwallowsHookErrors(_Hooked):
    """BUG: when a hook fails, the gradients stay local and nobody hears of it."""

    def around(self, hook: Hook, state: Any, bucket: Any) -> Any:
        """Call the hook, and do without it."""
        try:
            future = hook(state, bucket)
            future.wait()
        except ValueError:
            future = Future()
            future.set_result(bucket.buffer())
        return future


class NamesNoHook(DistributedDataParallel):
    """BUG: the logging data does not mention the hook."""

    def _get_ddp_logging_data(self) -> Any:
        return {name: value for name, value in super()._get_ddp_logging_data().items() if name != "comm_hook"}


class SyncsBuffersAlways(DistributedDataParallel):
    """BUG: buffers are synchronised before every forward, also after one under `no_sync`."""

    def will_sync_module_buffers(self) -> bool:
        """Agree."""
        return True


class BufferHookOnCopies(DistributedDataParallel):
    """BUG: a buffer hook works on copies, which go to the buffers whether its futures are complete or not."""

    def _register_buffer_comm_hook(self, state: Any, hook: Any, *args: Any, **kwargs: Any) -> None:
        def outer(given: Any, buffers: Mapping[str, Tensor]) -> None:
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            hook(given, copies)
            for name, buffer in buffers.items():
                buffer.copy_(copies[name])

        super()._register_buffer_comm_hook(state, outer, *args, **kwargs)


class TellsAutogradOfBufferHooks(ddp_impl.DistributedDataParallel):
    """BUG: what a buffer hook changes in place counts as a change of the buffers, which invalidates what saved them."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        if self._buffer_hook is None:
            super()._sync_buffers(authoritative)
            return
        with torch.no_grad():
            futures = self._buffer_hook.hook(self._buffer_hook.state, self.named_module_buffers)
        self.reducer.post_backward_futures.extend(futures or ())


class RecordsBufferHooks(ddp_impl.DistributedDataParallel):
    """BUG: a buffer hook that is called in training records gradients of what it does."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        if self._buffer_hook is None:
            super()._sync_buffers(authoritative)
            return
        with keeping_versions(self.modules_buffers):
            futures = self._buffer_hook.hook(self._buffer_hook.state, self.named_module_buffers)
        self.reducer.post_backward_futures.extend(futures or ())
