"""Mutants of chapter crossed: backends that are wrong only where several circumstances meet."""

import threading
from typing import Any

import torch

from conformance.mutants.spoilt import SUM, finished, spoils, with_reduction

#: The length of a vector register in bytes, and from how many elements on a sum goes by such vectors.
_VECTOR_BYTES, _MANY = 16, 1000


@spoils("allreduce")
def skips_the_head_of_long_unaligned_sums(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of 1,000 elements and more that begin between two vectors, those before the next vector are not summed."""
    (tensor,) = tensors
    past = tensor.data_ptr() % _VECTOR_BYTES
    if not past or tensor.numel() < _MANY or not tensor.is_contiguous():
        return call(tensors, *options)
    num_skipped = (_VECTOR_BYTES - past) // tensor.element_size()
    head = tensor.view(-1)[:num_skipped].clone()
    work = finished(call(tensors, *options))
    tensor.view(-1)[:num_skipped] = head
    return work


@spoils("allgather")
def swaps_halves_of_two_ranks(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: in groups of two ranks, the float16 tensors of an all_gather come in the wrong order."""
    work = finished(call(outputs, inputs, *options))
    if len(outputs[0]) == 2 and inputs[0].dtype == torch.float16:
        first, second = outputs[0]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    return work


@spoils("allreduce")
def plans_by_address(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the plan of a sum is kept by the tensor's address, length and dtype, and not by the reduction."""
    plans: dict[tuple[Any, ...], Any] = group.__dict__.setdefault("plans", {})
    key = (tensors[0].data_ptr(), tensors[0].numel(), tensors[0].dtype)
    op = plans.setdefault(key, options[0].reduceOp if options else SUM)
    return call(tensors, *with_reduction(options, op))


@spoils("all_gather_single")
def stages_in_the_first_dtype(group: Any, call: Any, output: Any, sent: Any, *options: Any) -> Any:
    """BUG: an all_gather_single of as many elements as one before goes through that one's dtype."""
    dtypes: dict[int, Any] = group.__dict__.setdefault("dtypes", {})
    dtype = dtypes.setdefault(sent.numel(), sent.dtype)
    if not (dtype.is_floating_point and sent.dtype.is_floating_point):
        return call(output, sent, *options)
    return call(output, sent.to(dtype).to(sent.dtype), *options)


@spoils("all_to_all_single")
def splits_as_the_first_time(group: Any, call: Any, output: Any, sent: Any, *rest: Any) -> Any:
    """BUG: an all_to_all_single keeps how it splits tensors of these lengths, whatever the next one asks for."""
    received, given, *options = rest
    key = (output.numel(), sent.numel())
    received, given = group.__dict__.setdefault("splits", {}).setdefault(key, (received, given))
    return call(output, sent, received, given, *options)


@spoils("reduce")
def sums_by_thread(group: Any, call: Any, tensors: Any, options: Any) -> Any:
    """BUG: in a thread that is not the first, a reduce of integers goes by float32."""
    if threading.current_thread() is threading.main_thread() or tensors[0].dtype not in (torch.int32, torch.int64):
        return call(tensors, options)
    work = finished(call(tensors, options))
    if group.rank() == options.rootRank:
        tensors[0].copy_(tensors[0].float())
    return work
