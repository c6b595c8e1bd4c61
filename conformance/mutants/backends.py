"""Backends that are wrong in ways that a DDP suffers from, each in one way: gloo, with one method spoilt."""

from collections.abc import Callable
from typing import Any

import torch

from conformance.mutants.spoilt import finished, reduction, spoils


def _sums(spoil: Callable[[Any, torch.Tensor, torch.Tensor], object]) -> Any:
    """Return the backend that calls `spoil(group, total, before)` when this rank has got a sum of dense numbers."""

    def allreduce(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
        before = tensors[0].clone()
        work = call(tensors, *options)
        if reduction(options) == "SUM" and not before.is_sparse and before.is_floating_point():
            work.wait()
            spoil(group, tensors[0], before)
        return work

    allreduce.__name__, allreduce.__doc__ = spoil.__name__, spoil.__doc__
    return spoils("allreduce")(allreduce)


@_sums
def FirstPage(group: Any, total: torch.Tensor, before: torch.Tensor) -> None:
    """BUG: of a large tensor only the first 64 elements are summed."""
    total.view(-1)[64:] = before.view(-1)[64:]


@_sums
def HalfSums(group: Any, total: torch.Tensor, before: torch.Tensor) -> None:
    """BUG: sums are made in bfloat16."""
    total.copy_(total.to(torch.bfloat16))


@_sums
def LooseSums(group: Any, total: torch.Tensor, before: torch.Tensor) -> None:
    """BUG: on the last rank sums are an ulp larger than on the others."""
    if group.rank() == group.size() - 1:
        total.copy_(torch.nextafter(total, torch.full_like(total, torch.inf)))


@_sums
def NoNan(group: Any, total: torch.Tensor, before: torch.Tensor) -> None:
    """BUG: sums that are no numbers come out as zero."""
    torch.nan_to_num_(total, nan=0.0, posinf=0.0, neginf=0.0)


@spoils("allreduce")
def SumsForMax(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: whatever the operation, it sums."""
    return call(tensors)


@spoils("allreduce")
def LocalSparse(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: sparse tensors stay what they were on each rank."""
    if not tensors[0].is_sparse:
        return call(tensors, *options)
    before = tensors[0].clone()
    work = finished(call(tensors, *options))
    tensors[0].copy_(before)  # for whoever reads the tensor as for whoever asks the Work
    return work


@spoils("broadcast")
def DeafToBroadcast(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the last rank takes part in broadcasts and keeps what it had."""
    before = tensors[0].clone()
    work = finished(call(tensors, *options))
    if group.rank() == group.size() - 1:
        tensors[0].copy_(before)
    return work


@spoils("broadcast")
def RootZero(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: broadcasts come from rank 0, whatever the root."""
    for given in options:
        given.rootRank = 0
    return call(tensors, *options)


@spoils("allgather")
def BackwardGather(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather lists the ranks in reverse order, which `ddp-conformance smoke` sees and no requirement."""
    return call([each[::-1] for each in outputs], inputs, *options)


@spoils("allgather")
def OwnGather(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather gives every rank its own tensor in all places."""
    work = finished(call(outputs, inputs, *options))
    for each in outputs[0]:
        each.copy_(inputs[0])
    return work
