"""Averaging a gradient as part of a graph: an operator for backward graphs, and what they get for a process group.

A forward graph passes each parameter through `average_in_backward`, which changes nothing and makes the backward graph
call `ddp_impl::average_gradient`. `fusion` replaces it by few collectives; not fused, it averages its one gradient.

Nothing of a process group is part of a graph but a name, and the divisor is an input, so a wrapper goes on with what
was compiled when it is given another group. A graph waits in C++, which asks a work's `wait` alone: a group that is
written in Python is given as one whose waits raise what has failed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl.base.nested_tensors import is_distributed, with_shard
from ddp_impl.torch_internals.distributed import register_group_name, unregister_group_name
from ddp_impl.torch_internals.tensors import functional_collectives
from ddp_impl.wire.collectives import finished


def checked(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return `group`, or one that checks its works if it is written in Python. Not collective."""
    return group if type(group) is dist.ProcessGroup else CheckedGroup(group)


class CheckedGroup(dist.ProcessGroup):
    """Has `inner` reduce, and hands out works whose `wait` raises. Graphs that average use nothing else."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner = inner
        self._unfinished: set[CheckedWork] = set()  # C++ code holds the C++ part of a work only

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name, which compilers ask for."""
        return str(self._inner.name())

    def allreduce(self, tensors: list[Tensor], *options: Any) -> CheckedWork:  # type: ignore[override]
        """Reduce in place."""
        return self._started(self._inner.allreduce(tensors, *options), tensors, "all_reduce")

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> CheckedWork:
        """Reduce several tensors in place."""
        return self._started(self._inner.allreduce_coalesced(tensors, *options), tensors, "all_reduce_coalesced")

    def _started(self, work: dist.Work, tensors: list[Tensor], operation: str) -> CheckedWork:
        checked = CheckedWork(work, tensors, operation, self._unfinished)
        self._unfinished.add(checked)
        return checked


class CheckedWork(dist.Work):
    """A work of which it is enough to ask `wait`; until then it is one of `unfinished`."""

    def __init__(self, inner: dist.Work, tensors: list[Tensor], operation: str, unfinished: set[CheckedWork]) -> None:
        super().__init__()
        self._inner, self._tensors, self._operation, self._unfinished = inner, tensors, operation, unfinished

    def wait(self, *timeout: Any) -> bool:
        """Wait; raises what `finished` raises."""
        self._unfinished.discard(self)
        finished(self._inner, self._operation, self._tensors)
        return True


class _Done(dist.Work):
    def wait(self, *timeout: Any) -> bool:
        return True


class Nobody(dist.ProcessGroup):
    """Stands for a group where nothing is to be averaged: of one rank, so that sums are what they were."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._done = _Done()  # C++ code holds the C++ part of a work only

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return a name, which compilers ask for."""
        return "nobody"

    def allreduce(self, tensors: list[Tensor], *options: Any) -> dist.Work:  # type: ignore[override]
        """Return a work that is done."""
        return self._done

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """Return a work that is done."""
        return self._done


_serial_numbers = itertools.count()


class GroupAlias:
    """A name under which functional collectives find a process group, which may be exchanged for another one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Register `group` under a new name. Names are equal on all ranks that wrap modules in the same order."""
        self.name = f"ddp_impl.{next(_serial_numbers)}"
        self._refer_to(group)

    def refer_to(self, group: dist.ProcessGroup) -> bool:
        """Let the name stand for `group` from now on; return whether it stood for another one."""
        if group is self._group:
            return False
        unregister_group_name(self.name)
        self._refer_to(group)
        return True

    def _refer_to(self, group: dist.ProcessGroup) -> None:
        self._group, self._registered = group, checked(group)  # the register keeps neither alive
        register_group_name(self.name, self._registered)

    def forget(self) -> None:
        """Give the name up; graphs that use it fail from now on."""
        unregister_group_name(self.name)


@torch.library.custom_op("ddp_impl::average_gradient", mutates_args=())
def average_gradient(gradient: Tensor, divisor: Tensor, group: str, index: int) -> Tensor:
    """Return the sum of `gradient / divisor` over the group of that name, of averaged parameter `index`; collective."""
    scaled = (gradient / divisor).to(gradient.dtype)  # it differs if neither has a dimension
    summed = functional_collectives.all_reduce(scaled, "sum", group)
    return functional_collectives.wait_tensor(summed)


@average_gradient.register_fake
def _(gradient: Tensor, divisor: Tensor, group: str, index: int) -> Tensor:
    return torch.empty_like(gradient)


class _AverageInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, divisor: Tensor, group: str, index: int) -> Tensor:
        ctx.save_for_backward(divisor)
        ctx.group, ctx.index = group, index
        ctx.placements = parameter.placements if is_distributed(parameter) else None  # type: ignore[attr-defined]
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (divisor,) = ctx.saved_tensors
        average = functools.partial(average_gradient, divisor=divisor, group=ctx.group, index=ctx.index)
        averaged = average(gradient) if ctx.placements is None else _on_shard(average, gradient, ctx.placements)
        return averaged, None, None, None


def _on_shard(average: Callable[[Tensor], Tensor], gradient: Any, placements: Any) -> Tensor:
    """Average the local shard of a DTensor's gradient, in the parameter's placement."""
    if gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return with_shard(gradient, average(gradient.to_local()))


def average_in_backward(parameter: Tensor, divisor: Tensor, group: str, index: int) -> Tensor:
    """Return `parameter`; its gradient will be averaged before it is accumulated."""
    return _AverageInBackward.apply(parameter, divisor, group, index)
