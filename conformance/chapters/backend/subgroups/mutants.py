"""Mutants of chapter subgroups: backends that take a group for the world, or one group for another."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import finished, of_class, spoils


@spoils("broadcast")
def takes_roots_for_global(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the root is taken for a global rank, so that groups without rank 0 send from another one."""
    if group.size() < dist.get_world_size():
        options[0].rootRank = max(0, options[0].rootRank - 1)
    return call(tensors, *options)


@spoils("gather", "scatter")
def has_its_roots_backwards(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: in a group that is not the world gather and scatter turn their lists round."""
    if group.size() < dist.get_world_size():
        return call(
            [each[::-1] for each in outputs] if outputs and isinstance(outputs[0], list) else outputs,
            [each[::-1] for each in inputs] if inputs and isinstance(inputs[0], list) else inputs,
            *options,
        )
    return call(outputs, inputs, *options)  # fmt: skip


@spoils("allgather", "reduce_scatter", "alltoall")
def dies_alone(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a group of one rank ends its process."""
    if group.size() == 1:
        os.abort()
    return call(outputs, inputs, *options)


@of_class
class is_one_of_a_kind(Relay):
    """BUG: groups of the same ranks share one state: a later one takes the tensors of an earlier one."""

    _last: dict[int, Any] = {}

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        earlier, group = self._last.get(self.size(), (None, None))
        self._last[self.size()] = (tensors[0], self)
        if earlier is not None and group is not self and earlier.shape == tensors[0].shape:
            earlier.zero_()
        return self.inner.allreduce(tensors, *options)


@of_class
class counts_groups(Relay):
    """BUG: a group is known by how many its process has made; after unequal histories it leaves rank 0 out."""

    _made = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self)._made += 1
        self._number = self._made

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        if self.rank() == 0 and self._number > 4 and self._number % 2 == 1:
            tensors[0].zero_()
        return self.inner.allreduce(tensors, *options)


@spoils("allreduce")
def reads_world_variables(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: in a group that leaves rank 0 out the first rank takes itself for a guest."""
    if group.rank() == 0 and dist.get_rank() != 0:
        tensors[0].zero_()
    return call(tensors, *options)


@of_class
class takes_slots_of_world_ranks(Relay):
    """BUG: a group puts what its members send into the slots of their ranks in the world."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        super().__init__(store, rank, world_size, timeout)
        store.set(f"world/{rank}", str(dist.get_rank() if dist.is_initialized() else rank))
        self._world_ranks = [int(store.get(f"world/{member}")) for member in range(world_size)]

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        work = finished(self.inner.allgather(outputs, inputs, *options))
        for rank, sent in zip(self._world_ranks, [slot.clone() for slot in outputs[0]], strict=True):
            outputs[0][rank % self.size()].copy_(sent)
        return work


@spoils("all_gather_single", "allgather")
def needs_a_sum_first(group: Any, call: Any, *args: Any) -> Any:
    """BUG: a group that has not summed yet cannot gather."""
    if not getattr(group, "has_summed", False):
        raise RuntimeError("the connections of this group have not been made")
    return call(*args)


def _first_sum(self: Any, tensors: Any, *options: Any) -> Any:
    self.has_summed = True
    return self.inner.allreduce(tensors, *options)


needs_a_sum_first.create.allreduce = _first_sum  # type: ignore[attr-defined]


@spoils("allreduce")
def works_up_to_four(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the tree of a sum has room for four ranks."""
    if group.rank() > 3:
        tensors[0].zero_()
    return call(tensors, *options)


@of_class
class gives_up_on_late_members(Relay):
    """BUG: members that are not there within two seconds are not waited for, and those that are raise an error."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(world_size)], timedelta(seconds=2))
        super().__init__(store, rank, world_size, timeout)


_known: list[Any] = []


@spoils("allreduce", "broadcast")
def has_room_for_32_groups(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the 33rd group of a process that is used takes the place of the first, and finds what that one had."""
    if group not in _known:
        _known.append(group)
    work = finished(call(tensors, *options))
    if _known.index(group) >= 32:
        tensors[0].zero_()
    return work


@spoils("all_gather_single")
def leaves_the_tail_of_one_rank(group: Any, call: Any, output: Any, sent: Any, *options: Any) -> Any:
    """BUG: in a group of one rank the last 8 elements of an all_gather_single of bfloat16 are not copied."""
    tail = output.view(-1)[-8:].clone()
    work = finished(call(output, sent, *options))
    if group.size() == 1 and output.dtype == torch.bfloat16 and output.numel() > len(tail):
        output.view(-1)[-8:] = tail
    return work
