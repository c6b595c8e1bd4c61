"""Five DDPs that are wrong on purpose, each in one way: a harness that lets one of them pass is broken itself.

They are torch's DistributedDataParallel with one promise taken out. Run one as any other subject:
`ddp-conformance run --ddp conformance.mutants.broken:NoDivision`.
"""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves


class NoDivision(DistributedDataParallel):
    """BUG: gradients are summed over the ranks and never divided by the world size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, summed)


class ForgetsTheLastBucket(DistributedDataParallel):
    """BUG: where a step has several buckets, the last one is not reduced; every rank keeps its own gradients there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _mean_but_for_last)


class StaleBuffers(DistributedDataParallel):
    """BUG: buffers are synchronised at construction and never again, so that they drift apart."""

    def _sync_buffers(self) -> None:
        pass


class ReducesInsideNoSync(DistributedDataParallel):
    """BUG: `no_sync` does nothing; every backward averages what has been accumulated."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing."""
        yield


class ZeroesUnusedGradients(DistributedDataParallel):
    """BUG: a parameter that no rank used ends the backward with a gradient of zeros, where it had none."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and let backward end with zeros where there is no gradient."""
        output = super().forward(*inputs, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(_at_end_of_backward, self._fill_with_zeros))
        return output

    def _fill_with_zeros(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _at_end_of_backward(callback: Any, gradient: Tensor) -> None:
    Variable._execution_engine.queue_callback(callback)


def summed(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Return the bucket's future sum over the group: a comm hook."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def _mean_but_for_last(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    if bucket.is_last() and bucket.index() > 0:
        untouched: Future[Tensor] = Future()
        untouched.set_result(bucket.buffer())
        return untouched
    bucket.buffer().div_(group.size())
    return summed(group, bucket)
