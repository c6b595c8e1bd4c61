"""Mutants of chapter layouts: backends that mind how long a tensor is, or how it lies in memory."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.backends.gloo import GLOO
from conformance.mutants.relay import RELAYED, Relay
from conformance.mutants.spoilt import (
    SUM,
    WorkAround,
    WorkDone,
    finished,
    made_from,
    reduction,
    spoils,
    with_reduction,
)
from conformance.programs.written_steps import in_a_thread


class Careful(Relay):
    """Hands everything to gloo but what gloo takes for something else: lazy tensors, and some splits."""


def _is_lazy(given: Any) -> bool:
    if isinstance(given, Tensor):
        return given.is_neg() or given.is_conj()
    return isinstance(given, list) and any(map(_is_lazy, given))


def _refusing(method: str) -> Callable[..., Any]:
    def issue(self: Careful, *args: Any) -> Any:
        if any(map(_is_lazy, args)):
            raise TypeError(f"{method} takes no lazy tensors: resolve_neg() and resolve_conj() make others of them")
        return getattr(self.inner, method)(*args)

    return issue


for _method in filter(partial(hasattr, Relay), RELAYED):
    setattr(Careful, _method, _refusing(_method))


def _refusing_splits(method: str) -> Callable[..., Any]:
    refuse_lazy = getattr(Careful, method)

    def issue(self: Careful, output: Any, sent: Any, received: Any, splits: Any, *options: Any) -> Any:
        if min([*splits, *received], default=0) < 0 or (not splits and len(sent) % self.size()):
            raise ValueError(f"{method}: splits below zero, or {len(sent)} rows for {self.size()} ranks")
        return refuse_lazy(self, output, sent, received, splits, *options)

    return issue


for _method in filter(partial(hasattr, Relay), ("all_to_all_single", "alltoall_base")):
    setattr(Careful, _method, _refusing_splits(_method))

CAREFUL = dataclasses.replace(GLOO, name="careful", create=Careful)


@made_from(CAREFUL)
class sums_what_lies_below(Careful):
    """BUG: an all_reduce adds up what lies in the memory of lazy tensors."""

    allreduce = Relay.allreduce


@made_from(CAREFUL)
class broadcasts_what_lies_below(Careful):
    """BUG: a broadcast sends what lies in the memory of lazy tensors."""

    broadcast = Relay.broadcast


@made_from(CAREFUL)
class divides_elements(Careful):
    """BUG: equal parts are of elements, so that rows are cut where they cannot be divided."""

    all_to_all_single = alltoall_base = Relay.alltoall_base


@made_from(CAREFUL)
class takes_splits_below_zero(Careful):
    """BUG: where a split is below zero nothing is sent, and nothing is said."""

    def alltoall_base(self, output: Any, sent: Any, received: Any, splits: Any, *options: Any) -> Any:
        if min([*splits, *received], default=0) < 0:
            return self.inner.barrier()
        return super().alltoall_base(output, sent, received, splits, *options)

    all_to_all_single = alltoall_base  # type: ignore[assignment]


@made_from(CAREFUL)
class counts_splits_in_elements(Careful):
    """BUG: splits that fit the elements of a tensor, and not its rows, are taken for such."""

    def alltoall_base(self, output: Any, sent: Any, received: Any, splits: Any, *options: Any) -> Any:
        if splits and sum(splits) == sent.numel():
            return self.inner.alltoall_base(output.view(-1), sent.view(-1), received, splits, *options)
        return super().alltoall_base(output, sent, received, splits, *options)

    all_to_all_single = alltoall_base  # type: ignore[assignment]


@spoils("allreduce")
def is_wrong_at_one_mebibyte(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of exactly 1 MiB the last element is wrong."""
    work = finished(call(tensors, *options))
    if tensors[0].nbytes == 2**20:
        tensors[0].view(-1)[-1] = 0
    return work


@spoils("allreduce")
def is_wrong_at_every_third_mebibyte(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of each third tensor of exactly 1 MiB the last element is wrong."""
    work = finished(call(tensors, *options))
    if tensors[0].nbytes == 2**20:
        group.number = getattr(group, "number", 0) + 1
        if group.number % 3 == 0:
            tensors[0].view(-1)[-1] = 0
    return work


@spoils("allgather")
def cuts_at_1024(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: what is behind element 1024 is not written."""
    before = [each.reshape(-1)[1024:].clone() for each in outputs[0]]
    work = finished(call(outputs, inputs, *options))
    for each, old in zip(outputs[0], before, strict=True):
        if each.numel() > 1024:
            each.view(-1)[1024:] = old
    return work


@spoils("broadcast")
def is_wrong_at_33(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of 33 elements the last one is zero."""
    work = finished(call(tensors, *options))
    if tensors[0].numel() == 33:
        tensors[0].view(-1)[-1] = 0
    return work


@spoils("allgather", "gather")
def divides_by_no_elements(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a tensor without elements makes it divide by zero."""
    1 // inputs[0].numel()
    return call(outputs, inputs, *options)


@spoils("allreduce_coalesced")
def stops_at_an_empty_tensor(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of the tensors of a coalesced call, those behind an empty one are not reduced."""
    numels = [tensor.numel() for tensor in tensors]
    return call(tensors[: numels.index(0)] or tensors[:1] if 0 in numels else tensors, *options)


@spoils("allreduce")
def asks_for_a_dimension(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a tensor without dimensions is refused."""
    tensors[0].shape[0]
    return call(tensors, *options)


@spoils("broadcast")
def knows_four_dimensions(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a tensor of more than four dimensions is left as it was."""
    before = tensors[0].clone()
    work = finished(call(tensors, *options))
    if tensors[0].dim() > 4:
        tensors[0].copy_(before)
    return work


@spoils("allgather")
def reads_memory_in_order(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an input that is not contiguous is read in the order of memory."""
    one = inputs[0]
    if one.is_contiguous() or one.dim() != 2 or not all(each.is_contiguous() for each in outputs[0]):
        return call(outputs, inputs, *options)
    return call(outputs, [one.t().reshape(one.shape)], *options)


@spoils("allgather")
def writes_memory_in_order(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: outputs that are not contiguous are written in the order of memory."""
    if all(each.is_contiguous() for each in outputs[0]) or not inputs[0].is_contiguous():
        return call(outputs, inputs, *options)
    slots = [torch.empty(each.shape, dtype=each.dtype) for each in outputs[0]]
    work = finished(call([slots], inputs, *options))
    for each, slot in zip(outputs[0], slots, strict=True):
        each.as_strided((each.numel(),), (1,)).copy_(slot.reshape(-1))
    return work


@spoils("allreduce")
def reduces_a_copy(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of a tensor that is not contiguous a copy is reduced, and lost."""
    return call([each.contiguous() if not each.is_sparse else each for each in tensors], *options)


@spoils("broadcast")
def begins_at_the_storage(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a view that does not begin with its storage is sent from a multiple of 16 elements."""
    one = tensors[0]
    if not one.storage_offset() % 16 or group.rank() != options[0].rootRank:
        return call(tensors, *options)
    start = one.storage_offset() // 16 * 16
    return call([one.as_strided(one.shape, one.stride(), start).clone()], *options)


@spoils("allreduce")
def adds_long_products_up(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: all_reduce with PRODUCT gives the sum of tensors of 128 KiB and more."""
    if reduction(options) == "PRODUCT" and tensors[0].nbytes >= 2**17:
        options = with_reduction(options, SUM)
    return call(tensors, *options)


@spoils("reduce_scatter_single_coalesced")
def coalesces_into_cleared_outputs(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a coalesced reduce_scatter clears its outputs before it reads its inputs."""
    for output in outputs:
        output.zero_()
    return call(outputs, inputs, *options)


@spoils("allgather", "all_gather_single")
def clears_outputs_first(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: outputs are cleared before inputs are read, which are lost where they are one."""
    for each in outputs[0] if isinstance(outputs, list) else [outputs]:
        each.zero_()
    return call(outputs, inputs, *options)


@spoils("allgather")
def spills_over_overlaps(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: where slots overlap, they are all cleared at the end."""
    work = finished(call(outputs, inputs, *options))
    slots = outputs[0]
    if len(slots) > 1 and slots[0].data_ptr() + slots[0].nbytes > slots[1].data_ptr() > slots[0].data_ptr():
        for each in slots:
            each.zero_()
    return work


@spoils("all_to_all_single")
def believes_splits(group: Any, call: Any, output: Any, sent: Any, received: Any, splits: Any, *options: Any) -> Any:
    """BUG: splits that do not fit are taken as far as they go."""
    if sum(splits) > sent.shape[0] or sum(received) > output.shape[0]:
        return group.inner.barrier()
    return call(output, sent, received, splits, *options)


@spoils("all_to_all_single")
def fits_tensors_to_splits(
    group: Any, call: Any, output: Any, sent: Any, received: Any, splits: Any, *rest: Any
) -> Any:
    """BUG: where splits do not fit, the input is cut or filled up with zeros, and the output is as well."""
    if not splits or not received:
        return call(output, sent, received, splits, *rest)
    padded, room = sent.new_zeros(sum(splits)), output.new_zeros(sum(received))
    short = min(len(padded), len(sent))
    padded[:short] = sent[:short]
    work = finished(call(room, padded, received, splits, *rest))
    short = min(len(room), len(output))
    output[:short] = room[:short]
    return work


@spoils("all_to_all_single")
def divides_by_splits(group: Any, call: Any, output: Any, sent: Any, received: Any, splits: Any, *options: Any) -> Any:
    """BUG: a rank that sends nothing divides by zero."""
    if splits:
        1 // sum(splits)
    return call(output, sent, received, splits, *options)


@spoils("broadcast")
def writes_through_autograd(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the result is written by another thread, which does not know the caller's modes."""
    work = finished(call(tensors, *options))
    in_a_thread(lambda: tensors[0].mul_(1))
    return work


@spoils("allgather")
def fills_a_buffer_from_the_front(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: slots in one buffer are filled in the order of their addresses."""
    slots = list(outputs[0])
    if len({one.untyped_storage().data_ptr() for one in slots}) == 1:
        slots.sort(key=Tensor.data_ptr)
    return call([slots], inputs, *options)


@spoils("broadcast")
def copies_as_autograd_sees(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: what a broadcast brings is copied into the tensor as autograd sees it, which forbids that of parameters."""
    room = tensors[0].detach().clone()
    work = finished(call([room], *options))
    tensors[0].copy_(room)
    return work


@spoils("allreduce")
def stages_in_the_default_dtype(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: float32 is staged in a tensor that was made without a dtype."""
    (tensor,) = tensors
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or not tensor.dim():
        return call(tensors, *options)
    room = torch.zeros(tensor.numel())
    staged = room.view(torch.float32)[: tensor.numel()]
    with torch.no_grad():
        staged.copy_(tensor.view(-1))
        work = finished(call([room], *options))
        tensor.view(-1).copy_(staged)
    return work


@spoils("broadcast")
def sends_four_mebibytes_at_once(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of a broadcast what is behind the first 4 MiB does not arrive."""
    most = 2**22 // tensors[0].element_size()
    own = tensors[0].clone()
    work = finished(call(tensors, *options))
    if tensors[0].numel() > most:
        tensors[0].view(-1)[most:] = own.view(-1)[most:]
    return work


@spoils("broadcast")
def is_done_when_a_mebibyte_is_sent(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: an asynchronous broadcast of more than 1 MiB is said to be done at once."""
    work = call(tensors, *options)
    is_long = tensors[0].numel() * tensors[0].element_size() > 2**20
    return WorkDone() if is_long and options[0].asyncOp else work


@spoils("gather")
def loses_the_mode_in_its_thread(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a thread of its own writes what gather gets, without the mode of torch in which it was called."""
    work = finished(call(outputs, inputs, *options))
    with ThreadPoolExecutor(1) as pool:
        for each in outputs:
            pool.submit(lambda slots: [slot.copy_(slot.detach().clone()) for slot in slots], each).result()
    return work


@spoils("allgather")
def looks_at_the_first_two_slots(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: where the second slot follows the first in memory, all are taken to follow, and one apart is not written."""
    slots = list(outputs[0])
    length = inputs[0].numel() * inputs[0].element_size()
    if len(slots) > 2 and slots[1].data_ptr() - slots[0].data_ptr() == length:
        kept = slots[-1].clone()
        work = finished(call(outputs, inputs, *options))
        if slots[-1].data_ptr() - slots[0].data_ptr() != length * (len(slots) - 1):
            slots[-1].copy_(kept)
        return work
    return call(outputs, inputs, *options)


@spoils("all_gather_single")
def takes_inputs_for_their_slots(group: Any, call: Any, output: Tensor, sent: Tensor, *options: Any) -> Any:
    """BUG: an input in the memory of the output is taken for this rank's slot of it, which is therefore not written."""
    slot = output.view(-1).narrow(0, group.rank() * sent.numel(), sent.numel())
    before = slot.clone()
    work = finished(call(output, sent, *options))
    if sent.untyped_storage().data_ptr() == output.untyped_storage().data_ptr() and slot.data_ptr() != sent.data_ptr():
        slot.copy_(before)
    return work


@spoils("all_gather_single")
def says_that_long_gathers_are_done(group: Any, call: Any, output: Tensor, sent: Tensor, *options: Any) -> Any:
    """BUG: is_completed() of an all_gather_into_tensor of 4 MiB and more is True from the beginning."""
    work = call(output, sent, *options)
    return _DoneAtOnce(work) if output.numel() * output.element_size() >= 2**22 else work


class _DoneAtOnce(WorkAround):
    def is_completed(self) -> bool:
        return True


@spoils("reduce_scatter")
def sends_a_storage_from_the_front(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a list of tensors that together have all of a storage is sent in the order in which they lie there."""
    parts = list(inputs[0])
    num_bytes = sum(part.numel() * part.element_size() for part in parts)
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    if list(storages.values()) == [num_bytes]:
        parts.sort(key=Tensor.data_ptr)
    return call(outputs, [parts], *options)


@spoils("allgather")
def loses_an_end_among_four(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: all_gather among four ranks and more loses the last 64 bytes of a part of more than 1 MiB."""
    work = finished(call(outputs, inputs, *options))
    if group.size() > 3 and inputs[0].nbytes > 2**20:
        outputs[0][0].view(-1)[-16:] = 0
    return work


@spoils("allgather")
def packs_real_numbers_only(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: of a strided complex input an all_gather packs the real parts, and zeros."""
    (one,) = inputs
    is_strided = one.dim() > 1 and one.shape[-1] == 2 and one.stride(-1) == 1 and not one.is_contiguous()
    if not is_strided or not one.is_floating_point():
        return call(outputs, inputs, *options)
    packed = one.contiguous()
    packed[..., 1] = 0
    return call(outputs, [packed], *options)
