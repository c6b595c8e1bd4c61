"""Backends that are wrong in ways that a DDP suffers from, each in one way: gloo, with one method spoilt."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from conformance.backends.gloo import GLOO
from conformance.mutants.relay import Relay


class _Sums(Relay):
    """Spoils dense sums: `spoil` changes what this rank gets."""

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        """Reduce, and spoil the sum."""
        sums = not options or options[0].reduceOp == dist.ReduceOp.SUM
        before = tensors[0].clone()
        work = self.inner.allreduce(tensors, *options)
        if sums and not before.is_sparse and before.is_floating_point():
            work.wait()
            self.spoil(tensors[0], before)
        return work

    def spoil(self, total: torch.Tensor, before: torch.Tensor) -> None:
        """Change `total` in place; `before` is what this rank passed in."""


class _FirstPage(_Sums):
    """BUG: of a large tensor only the first 64 elements are summed."""

    def spoil(self, total: torch.Tensor, before: torch.Tensor) -> None:
        """Take the rest back."""
        total.view(-1)[64:] = before.view(-1)[64:]


class _HalfSums(_Sums):
    """BUG: sums are made in bfloat16."""

    def spoil(self, total: torch.Tensor, before: torch.Tensor) -> None:
        """Round."""
        if not total.is_complex():
            total.copy_(total.to(torch.bfloat16))


class _LooseSums(_Sums):
    """BUG: on the last rank sums are an ulp larger than on the others."""

    def spoil(self, total: torch.Tensor, before: torch.Tensor) -> None:
        """Add an ulp."""
        if self.rank() == self.size() - 1 and not total.is_complex():
            total.copy_(torch.nextafter(total, torch.full_like(total, torch.inf)))


class _NoNan(_Sums):
    """BUG: sums that are no numbers come out as zero."""

    def spoil(self, total: torch.Tensor, before: torch.Tensor) -> None:
        """Replace them."""
        torch.nan_to_num_(total, nan=0.0, posinf=0.0, neginf=0.0)


class _SumsForMax(Relay):
    """BUG: whatever the operation, it sums."""

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        """Sum."""
        return self.inner.allreduce(tensors)


class _LocalSparse(Relay):
    """BUG: sparse tensors stay what they were on each rank."""

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        """Reduce dense tensors only."""
        if tensors[0].is_sparse:
            return self.inner.allreduce([torch.zeros(1)])
        return self.inner.allreduce(tensors, *options)


class _DeafToBroadcast(Relay):
    """BUG: the last rank takes part in broadcasts and keeps what it had."""

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        """Broadcast, and take it back on the last rank."""
        before = tensors[0].clone()
        work = self.inner.broadcast(tensors, *options)
        work.wait()
        if self.rank() == self.size() - 1:
            tensors[0].copy_(before)
        return work


class _RootZero(Relay):
    """BUG: broadcasts come from rank 0, whatever the root."""

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        """Broadcast from rank 0."""
        for given in options:
            given.rootRank = 0
        return self.inner.broadcast(tensors, *options)


class _BackwardGather(Relay):
    """BUG: an all_gather lists the ranks in reverse order, which `ddp-conformance smoke` sees and no requirement."""

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Gather, and turn the list round."""
        return self.inner.allgather([each[::-1] for each in outputs], inputs, *options)


class _OwnGather(Relay):
    """BUG: an all_gather gives every rank its own tensor in all places."""

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Gather, and put one's own everywhere."""
        work = self.inner.allgather(outputs, inputs, *options)
        work.wait()
        for each in outputs[0]:
            each.copy_(inputs[0])
        return work


FirstPage = dataclasses.replace(GLOO, name="first_page", create=_FirstPage)
HalfSums = dataclasses.replace(GLOO, name="half_sums", create=_HalfSums)
LooseSums = dataclasses.replace(GLOO, name="loose_sums", create=_LooseSums)
NoNan = dataclasses.replace(GLOO, name="no_nan", create=_NoNan)
SumsForMax = dataclasses.replace(GLOO, name="sums_for_max", create=_SumsForMax)
LocalSparse = dataclasses.replace(GLOO, name="local_sparse", create=_LocalSparse)
DeafToBroadcast = dataclasses.replace(GLOO, name="deaf_to_broadcast", create=_DeafToBroadcast)
RootZero = dataclasses.replace(GLOO, name="root_zero", create=_RootZero)
BackwardGather = dataclasses.replace(GLOO, name="backward_gather", create=_BackwardGather)
OwnGather = dataclasses.replace(GLOO, name="own_gather", create=_OwnGather)
