"""Mutants of chapter failures: backends that take mistaken calls for right ones, or do not get over them."""

from typing import Any

import torch
import torch.distributed as dist

from conformance.mutants.spoilt import finished, spoils


@spoils("allgather")
def takes_what_fits(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: lists of a wrong length are taken as far as they go."""
    if len(outputs[0]) != group.size():
        return group.inner.barrier()
    return call(outputs, inputs, *options)


@spoils("all_gather_single")
def takes_any_size(group: Any, call: Any, output: Any, sent: Any, *options: Any) -> Any:
    """BUG: an output of a wrong size is left alone without a word."""
    if output.numel() != sent.numel() * group.size():
        return group.inner.barrier()
    return call(output, sent, *options)


@spoils("allgather")
def is_sulky(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: after a call that was refused, sums are wrong."""
    try:
        return call(outputs, inputs, *options)
    except RuntimeError:
        group.sulks = True
        raise


def _sulking(self: Any, tensors: Any, *options: Any) -> Any:
    if getattr(self, "sulks", False):
        tensors[0].zero_()
    return self.inner.allreduce(tensors, *options)


is_sulky.create.allreduce = _sulking  # type: ignore[attr-defined]


@spoils("alltoall")
def leaves_a_group_of_calls_open(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a dtype is refused between the beginning and the end of a group of calls: what follows never leaves.

    So NCCL's all_to_all of a list does in torch 2.11 (seen on an H100: each all_reduce kept the rank's own values).
    """
    if inputs[0].dtype == torch.int16:
        group.is_open = True
        raise TypeError("the backend has no number for int16")
    return call(outputs, inputs, *options)


def _into_the_open(self: Any, tensors: Any, *options: Any) -> Any:
    return self.inner.barrier() if getattr(self, "is_open", False) else self.inner.allreduce(tensors, *options)


leaves_a_group_of_calls_open.create.allreduce = _into_the_open  # type: ignore[attr-defined]


@spoils("allgather")
def numbers_refused_calls(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a call that is refused has taken a number, by which ranks that did not make it no longer match."""
    try:
        return call(outputs, inputs, *options)
    except RuntimeError:
        group.refused = getattr(group, "refused", 0) + 1
        raise


def _numbered(self: Any, tensors: Any, *options: Any) -> Any:
    numbers = torch.zeros(self.size())
    numbers[self.rank()] = getattr(self, "refused", 0)
    finished(self.inner.allreduce([numbers], dist.AllreduceOptions()))
    if len(numbers.unique()) > 1:
        tensors[0].zero_()
    return self.inner.allreduce(tensors, *options)


numbers_refused_calls.create.allreduce = _numbered  # type: ignore[attr-defined]


@spoils("scatter")
def leaves_out_the_rest(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a scatter takes as many tensors of a list as there are ranks, and says nothing of the others."""
    return call(outputs, [tensors[: group.size()] for tensors in inputs], *options)
