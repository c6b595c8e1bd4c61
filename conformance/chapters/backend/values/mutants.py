"""Mutants of chapter values: backends that put something else into some output."""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from conformance.mutants.gathers import GATHERS, Gathers
from conformance.mutants.spoilt import WorkAround, finished, made_from, reduction, spoils


@spoils("allreduce")
def leaves_out_the_last_rank(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the last rank's tensor is not in the sum."""
    if reduction(options) == "SUM" and group.rank() == group.size() - 1:
        tensors[0].zero_()
    return call(tensors, *options)


@spoils("allreduce")
def is_wrong_on_rank_1_only(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: rank 1 alone gets a wrong last element."""
    work = finished(call(tensors, *options))
    if group.rank() == 1 and tensors[0].numel() > 4:
        tensors[0].view(-1)[-1:] = 0
    return work


def _gathered(group: Any, tensor: Any) -> list[Any]:
    slots = [torch.empty_like(tensor) for _ in range(group.size())]
    group.inner.allgather([slots], [tensor]).wait()
    return slots


def _own_order(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    if tensors[0].dtype not in (torch.float32, torch.float64) or reduction(options) != "SUM":
        return call(tensors, *options)
    parts = _gathered(group, tensors[0])
    total = parts[group.rank()].clone()
    for part in parts[group.rank() + 1 :] + parts[: group.rank()]:
        total += part
    tensors[0].copy_(total)
    return group.inner.barrier()


@spoils("allreduce")
def begins_with_its_own(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: each rank adds up in an order of its own, beginning with itself."""
    return _own_order(group, call, tensors, *options)


@spoils("allreduce")
def begins_with_its_own_when_long(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of more than 64 KiB each rank adds up in an order of its own."""
    return _own_order(group, call, tensors, *options) if tensors[0].nbytes > 2**16 else call(tensors, *options)


@spoils("allreduce")
def begins_with_its_own_in_subgroups(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: in a group of some of the ranks each adds up in an order of its own."""
    is_part = group.size() < dist.get_world_size()
    return _own_order(group, call, tensors, *options) if is_part else call(tensors, *options)


@spoils("allreduce_coalesced")
def begins_with_its_own_when_coalesced(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: in a coalesced call each rank adds up in an order of its own."""
    return _own_order(group, call, tensors, *options) if len(tensors) == 1 else call(tensors, *options)


@spoils("allgather")
def gathers_as_much_as_it_has(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: of every rank it takes as many elements of an all_gather as it has itself, and says nothing of others."""
    if len({each.numel() for each in outputs[0]}) == 1:
        return call(outputs, inputs, *options)
    longest = max(each.numel() for each in outputs[0])
    padded = torch.zeros(longest, dtype=inputs[0].dtype)
    padded[: inputs[0].numel()] = inputs[0]
    slots = [torch.zeros_like(padded) for _ in outputs[0]]
    work = finished(call([slots], [padded], *options))
    for each, slot in zip(outputs[0], slots, strict=True):
        number = min(each.numel(), inputs[0].numel())
        each[:number] = slot[:number]
    return work


@spoils("allreduce")
def adds_up_in_turning_order(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: in every second sum the order in which ranks are added up is the other way round."""
    if tensors[0].dtype not in (torch.float32, torch.float64) or reduction(options) != "SUM":
        return call(tensors, *options)
    group.turn = not getattr(group, "turn", False)
    parts = _gathered(group, tensors[0])
    parts = (
        parts if group.turn else [*parts[2:], *parts[:2]] if len(parts) > 2 else [part * 1.0000001 for part in parts]
    )
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    tensors[0].copy_(total)
    return group.inner.barrier()


@spoils("broadcast")
def broadcasts_from_rank_0(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: broadcasts come from rank 0, whatever the root."""
    options[0].rootRank = 0
    return call(tensors, *options)


@spoils("broadcast")
def is_deaf_on_the_last_rank(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the last rank keeps what it had in a broadcast."""
    before = tensors[0].clone()
    work = finished(call(tensors, *options))
    if group.rank() == group.size() - 1 != options[0].rootRank:
        tensors[0].copy_(before)
    return work


@spoils("reduce")
def reduces_to_rank_0(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the reduction goes to rank 0, whatever the root."""
    options[0].rootRank = 0
    return call(tensors, *options)


@spoils("allgather")
def gathers_backwards(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather lists the ranks in reverse order."""
    return call([each[::-1] for each in outputs], inputs, *options)


@spoils("all_gather_single")
def joins_backwards(group: Any, call: Any, output: Any, sent: Any, *options: Any) -> Any:
    """BUG: all_gather_single joins the parts in reverse order."""
    work = finished(call(output, sent, *options))
    output.copy_(torch.cat(output.chunk(group.size())[::-1]) if output.numel() else output)
    return work


@spoils("reduce_scatter_single", "reduce_scatter")
def scatters_to_the_neighbour(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: what is reduced for a rank goes to the one behind it."""
    if isinstance(outputs, torch.Tensor):
        return call(
            outputs, torch.roll(inputs, inputs.shape[0] // group.size(), 0) if inputs.dim() else inputs, *options
        )
    return call(outputs, [[*inputs[0][1:], inputs[0][0]]], *options)


@spoils("reduce_scatter")
def adds_zeros_at_unlike_sizes(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: rank 0 adds zeros in a reduce_scatter of a list whose tensors are not of one size."""
    unlike = len({each.numel() for each in inputs[0]}) > 1
    zeros = [[torch.zeros_like(each) for each in inputs[0]]]
    return call(outputs, zeros if unlike and group.rank() == 0 else inputs, *options)


@spoils("gather")
def gathers_in_reverse(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: gather lists the ranks in reverse order."""
    return call([each[::-1] for each in outputs], inputs, *options)


@spoils("scatter")
def deals_out_one_too_far(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: scatter gives each rank the tensor of the rank behind it."""
    return call(outputs, [[*each[1:], each[0]] for each in inputs], *options)


@spoils("alltoall")
def sends_everybody_the_first(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: all_to_all sends what is for rank 0 to every rank."""
    return call(
        outputs, [inputs[0].clone() for _ in inputs] if len({one.shape for one in inputs}) == 1 else inputs, *options
    )


@spoils("all_to_all_single")
def exchanges_with_the_neighbours(group: Any, call: Any, output: Any, sent: Any, *rest: Any) -> Any:
    """BUG: with equal splits every rank gets the parts that were meant for the rank behind it."""
    if rest and rest[0]:
        return call(output, sent, *rest)
    parts = sent.chunk(group.size())
    return call(output, torch.cat([*parts[1:], parts[0]]), *rest)


@spoils("all_to_all_single")
def begins_at_the_front(group: Any, call: Any, output: Any, sent: Any, *rest: Any) -> Any:
    """BUG: with uneven splits what is received from the last rank comes first."""
    work = finished(call(output, sent, *rest))
    if rest and rest[0]:
        parts = output.split(rest[0])
        output.copy_(torch.cat([*parts[::-1]]))
    return work


@spoils("all_to_all_single")
def turns_round_one_sided_splits(group: Any, call: Any, output: Any, sent: Any, *rest: Any) -> Any:
    """BUG: with the splits of one side only, what is received comes out backwards."""
    work = finished(call(output, sent, *rest))
    if bool(rest[0]) != bool(rest[1]):
        output.copy_(output.flip(0))
    return work


@spoils("allgather", "all_gather_single", "gather")
def clears_its_input(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: what was gathered is cleared where it came from."""
    work = finished(call(outputs, inputs, *options))
    for tensor in inputs if isinstance(inputs, list) else [inputs]:
        tensor.zero_()
    return work


@spoils("reduce_scatter_single")
def adds_up_in_its_input(group: Any, call: Any, output: Any, sent: Any, *options: Any) -> Any:
    """BUG: reduce_scatter_single uses its input for partial sums."""
    work = finished(call(output, sent, *options))
    sent.view(-1)[: output.numel()] = output.view(-1)
    return work


@spoils("allreduce", "broadcast")
def writes_one_too_many(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: one element behind the tensor is written, too, where there is memory."""
    work = finished(call(tensors, *options))
    one = tensors[0]
    end = one.storage_offset() + one.numel()
    if one.is_contiguous() and (end + 1) * one.element_size() <= one.untyped_storage().nbytes():
        one.detach().as_strided((1,), (1,), end).zero_()
    return work


@spoils("allgather")
def writes_before_the_slots(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather writes an element before the first slot, where there is memory."""
    work = finished(call(outputs, inputs, *options))
    one = outputs[0][0]
    if one.is_contiguous() and one.storage_offset() > 0:
        one.as_strided((1,), (1,), one.storage_offset() - 1).zero_()
    return work


@spoils("allgather", "alltoall")
def leaves_the_last_eight(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: of a long tensor the last 8 elements are not written."""
    lists = outputs[0] if isinstance(outputs[0], list) else outputs
    before = [each.reshape(-1)[-8:].clone() for each in lists]
    work = finished(call(outputs, inputs, *options))
    for each, old in zip(lists, before, strict=True):
        if each.numel() > 500 and each.is_contiguous():
            each.view(-1)[-8:] = old
    return work


@spoils("broadcast")
def forgets_the_odd_element(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of an odd number of elements the last one is not received."""
    one = tensors[0]
    before = one.reshape(-1)[-1:].clone()
    work = finished(call(tensors, *options))
    if one.numel() % 2 and one.numel() > 8 and group.rank() != options[0].rootRank and one.is_contiguous():
        one.view(-1)[-1:] = before
    return work


@spoils("allreduce")
def is_wrong_every_thirtieth_time(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: every thirtieth sum is what the call before gave."""
    group.calls = getattr(group, "calls", 0) + 1
    work = finished(call(tensors, *options))
    last, group.last = getattr(group, "last", None), tensors[0].clone()
    if group.calls % 30 == 0 and last is not None and last.shape == tensors[0].shape and last.dtype == tensors[0].dtype:
        tensors[0].copy_(last)
    return work


@spoils("allgather")
def writes_into_kept_results(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: the first slot of an all_gather is written into that of the one before, too."""
    work = finished(call(outputs, inputs, *options))
    kept, group.kept = getattr(group, "kept", None), outputs[0][0]
    if kept is not None and kept.shape == group.kept.shape and kept.dtype == group.kept.dtype:
        kept.copy_(group.kept)
    return work


@spoils("allreduce")
def confuses_threads(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a sum that another thread than the main one asks for is what that thread passed in."""
    before = tensors[0].clone()
    work = call(tensors, *options)
    if threading.current_thread() is not threading.main_thread():
        work.wait()
        tensors[0].copy_(before)
    return work


class _OutOfStaging(WorkAround):
    """Copies what came out of the staging buffer when it is waited for."""

    staged: list[Any]

    def wait(self, *timeout: Any) -> bool:
        self.inner.wait(*timeout)
        for output, staged in zip(self.tensors, self.staged, strict=True):
            output.copy_(staged)
        return True


_staging: dict[Any, list[Any]] = {}


@spoils("allgather")
def stages_in_one_buffer(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: all_gathers of one size and dtype go through one buffer of the process, whichever group they are of."""
    (given,) = outputs
    staged = _staging.setdefault(
        (len(given), inputs[0].numel(), inputs[0].dtype), [torch.empty_like(inputs[0]) for _ in given]
    )
    if staged[0].shape != inputs[0].shape:
        return call(outputs, inputs, *options)
    inner = finished(call([staged], inputs, *options))
    work = _OutOfStaging(inner, given)
    work.staged = staged
    return work


@spoils("allgather")
def minds_what_is_in_flight(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather beside sums in flight gives every rank its own tensor in slot 0."""
    busy = any(not one.is_completed() for one in getattr(group, "others", [])) or getattr(group, "num_sums", 0) >= 20
    work = finished(call(outputs, inputs, *options))
    if busy:
        outputs[0][0].copy_(inputs[0])
    return work


_relayed_sum = minds_what_is_in_flight.create


def _counting(self: Any, tensors: Any, *options: Any) -> Any:
    self.num_sums = getattr(self, "num_sums", 0) + 1
    return self.inner.allreduce(tensors, *options)


_relayed_sum.allreduce = _counting  # type: ignore[attr-defined]


@spoils("broadcast")
def loses_the_sign_of_zero(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a broadcast adds zero, so that -0.0 becomes 0.0."""
    work = finished(call(tensors, *options))
    if tensors[0].is_floating_point():
        tensors[0].add_(0.0)
    return work


@spoils("allgather")
def flushes_subnormals(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather makes zeros of subnormal numbers."""
    work = finished(call(outputs, inputs, *options))
    for each in outputs[0]:
        if each.dtype in (torch.float32, torch.float64):
            each[each.abs() < torch.finfo(each.dtype).tiny] = 0
    return work


@spoils("gather")
def sends_what_it_has_staged(group: Any, call: Any, outputs: Any, inputs: Any, options: Any) -> Any:
    """BUG: from the third gather of one tensor on, it sends what the tensor held at the second."""
    (sent,) = inputs
    staged: WeakIdKeyDictionary = group.__dict__.setdefault("staged", WeakIdKeyDictionary())
    number, held = staged.get(sent, (0, None))
    staged[sent] = (number + 1, sent.clone() if number == 1 else held)
    return call(outputs, inputs if held is None else [held], options)


@spoils("allgather")
def draws_a_number(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: rank 0 draws a random number for the name of each all_gather of integers."""
    if group.rank() == 0 and not inputs[0].is_floating_point():
        torch.rand(1)
    return call(outputs, inputs, *options)


@made_from(GATHERS)
class joins_the_root_first(Gathers):
    """BUG: a gather_single puts the root's own tensor into place 0, and the others' behind it."""

    def ordered(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [parts.pop(self.rank()), *parts]


@made_from(GATHERS)
class rounds_what_it_joins(Gathers):
    """BUG: a gather_single of doubles has the precision of floats."""

    def ordered(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part.float().double() if part.dtype == torch.float64 else part for part in parts]
