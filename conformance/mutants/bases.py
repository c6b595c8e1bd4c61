"""What mutants of several chapters are made from: DDPs with one place to be wrong in."""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_leaves

from conformance.errors import present
from ddp_impl.api import distributed
from ddp_impl.base.options import ReducerOptions
from ddp_impl.compile.compiled_calls import CompiledCalls


def summed(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Return the bucket's future sum over the group: a comm hook."""
    work = present(dist.all_reduce(bucket.buffer(), group=group, async_op=True))
    return work.get_future().then(lambda future: future.value()[0])


class NothingToWaitFor:
    """Stands for the work of a collective: there is nothing to wait for, and no future."""

    def wait(self) -> None:
        """Return at once."""


class ActsAfterBackward(TorchDDP):
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
            at_end(self._local_gradients_are_there)

    def _local_gradients_are_there(self) -> None:
        self.before_reduced()
        at_end(self.after_reduced)  # behind the callback in which the reducer hands out the averages

    def before_reduced(self) -> None:
        """Do nothing."""

    def after_reduced(self) -> None:
        """Do nothing."""


def at_end(callback: Callable[[], None]) -> None:
    """Have autograd call `callback` when the backward that runs is over."""
    Variable._execution_engine.queue_callback(callback)


def leaving_the_inside(calls: CompiledCalls, exchanged: Callable[[Any], Any], callback: Any) -> Any:
    """Return the callback that compiles within a forward: the user's, unless the wrapper itself is compiled."""
    forward = calls._forward
    return callback if forward is None or forward.compiler is None else exchanged(callback)


@contextlib.contextmanager
def with_options(**changes: Any) -> Iterator[None]:
    """Build DDPs of `ddp_impl` within the block as if their users had asked for `changes` of `ReducerOptions`."""

    def changed(**asked: Any) -> ReducerOptions:
        return ReducerOptions(**{**asked, **changes})

    with mock.patch.object(distributed, "ReducerOptions", changed):
        yield
