"""Further DDPs that are wrong on purpose, in ways that many a training would never show.

Each is torch's DistributedDataParallel with one small change; together they show that requirements which no DDP at hand
breaks can fail.
"""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.
import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from conformance.mutants.broken import summed


class _ActsAfterBackward(DistributedDataParallel):
    """Calls `before_reduced` when all local gradients are there, and `after_reduced` when they are averaged."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        output = super().forward(*inputs, **kwargs)
        self._queued = False
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._queue)
        return output

    def _queue(self, _: Tensor) -> None:
        if not self._queued:
            self._queued = True
            _at_end(self._local_gradients_are_there)

    def _local_gradients_are_there(self) -> None:
        self.before_reduced()
        _at_end(self.after_reduced)  # behind the callback in which the reducer hands out the averages

    def before_reduced(self) -> None:
        """Do nothing."""

    def after_reduced(self) -> None:
        """Do nothing."""


def _at_end(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)


class SkipsInitialSync(DistributedDataParallel):
    """BUG: every rank starts from its own parameters and buffers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "init_sync": False})


class CopiesArguments(DistributedDataParallel):
    """BUG: lists and dicts among the arguments of forward arrive as copies."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on copies."""
        return super().forward(*tree_map(lambda leaf: leaf, inputs), **kwargs)


class FlattensNamedTuples(DistributedDataParallel):
    """BUG: a named tuple comes out of forward as a plain tuple."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and lose the names."""
        output = super().forward(*inputs, **kwargs)
        return tuple(output) if isinstance(output, tuple) else output


class SkipsModuleHooks(DistributedDataParallel):
    """BUG: the module's forward is called directly, so that its hooks never fire."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return torch.nn.Sequential.forward(self.module, *inputs, **kwargs)


class NamesWithoutPrefix(DistributedDataParallel):
    """BUG: the state dict has the module's names, without `module.`."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict."""
        return self.module.state_dict(*args, **kwargs)


class DifferentBits(_ActsAfterBackward):
    """BUG: the last rank rounds differently, so that replicas drift apart by an ulp per step."""

    def after_reduced(self) -> None:
        """Change every gradient by an ulp."""
        if self.process_group.rank() == self.process_group.size() - 1:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(torch.nextafter(parameter.grad, torch.full_like(parameter.grad, torch.inf)))


class ContiguousGradients(_ActsAfterBackward):
    """BUG: gradients are contiguous whatever the strides of their parameters."""

    def after_reduced(self) -> None:
        """Make gradients contiguous."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()


class Warns(_ActsAfterBackward):
    """BUG: every backward warns."""

    def after_reduced(self) -> None:
        """Warn."""
        warnings.warn("Grad strides do not match bucket view strides.", stacklevel=1)


class NeverViews(DistributedDataParallel):
    """BUG: `gradient_as_bucket_view` saves nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "gradient_as_bucket_view": False})


class AlwaysViews(DistributedDataParallel):
    """BUG: gradients are views of buckets for everybody."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "gradient_as_bucket_view": True})


class SwallowsNan(DistributedDataParallel):
    """BUG: NaN and infinities are replaced before they are sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _mean_of_numbers)


class DividesLast(DistributedDataParallel):
    """BUG: gradients are summed first and divided afterwards, also where the sum does not fit the dtype."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _sum_then_divide)


class ReducesTwice(DistributedDataParallel):
    """BUG: every bucket is reduced twice. The mean of means is the mean: only the traffic shows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _mean_of_means)


class OneBucket(DistributedDataParallel):
    """BUG: whatever the caps, all gradients travel in one bucket, after the last of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("bucket_cap_mb_list", None)
        super().__init__(*args, **{**kwargs, "bucket_cap_mb": 25})


class RegistrationOrder(DistributedDataParallel):
    """BUG: buckets follow the order of registration from the first step on, and for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "find_unused_parameters": True})


class TellsAutograd(DistributedDataParallel):
    """BUG: synchronising buffers counts as changing them, which invalidates graphs that saved them."""

    def _sync_buffers(self) -> None:
        super()._sync_buffers()
        with torch.no_grad():
            for buffer in self.modules_buffers:
                buffer.copy_(buffer.clone())


class FloatingBuffersOnly(DistributedDataParallel):
    """BUG: only floating-point buffers are synchronised."""

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()
        self.modules_buffers = [buffer for buffer in self.modules_buffers if buffer.is_floating_point()]


class KeepsFirstBuffers(DistributedDataParallel):
    """BUG: the buffers that were there at construction are synchronised, not those that took their places."""

    def _assign_modules_buffers(self) -> None:
        if not hasattr(self, "modules_buffers"):
            super()._assign_modules_buffers()


class InnerNoSyncEndsOuter(DistributedDataParallel):
    """BUG: leaving any `no_sync` switches synchronisation on."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Switch synchronisation off, then on."""
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = True


class NoSyncSurvivesException(DistributedDataParallel):
    """BUG: when an exception leaves `no_sync`, synchronisation stays off."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Switch synchronisation off, and back on only if all goes well."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = before


class UnusedHereStaysNone(_ActsAfterBackward):
    """BUG: a rank that did not use a parameter gets no gradient for it, although others did."""

    def before_reduced(self) -> None:
        """Note what has no gradient of its own."""
        self._absent = [parameter for parameter in self.module.parameters() if parameter.grad is None]

    def after_reduced(self) -> None:
        """Take back what came from other ranks."""
        for parameter in self._absent:
            parameter.grad = None


def _mean_of_numbers(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    bucket.buffer().nan_to_num_().div_(group.size())
    return summed(group, bucket)


def _sum_then_divide(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    return summed(group, bucket).then(lambda future: future.value().div_(group.size()))


def _mean_of_means(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    bucket.buffer().div_(group.size())
    dist.all_reduce(bucket.buffer(), group=group)
    bucket.buffer().div_(group.size())
    return summed(group, bucket)
