"""Mutants of chapter objects: backends that lose bytes, or the lengths of what they carry."""

from typing import Any

import torch
import torch.distributed as dist

from conformance.mutants.spoilt import finished, spoils


@spoils("allgather")
def mixes_up_bytes(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather of bytes lists the ranks in reverse order."""
    if inputs[0].dtype != torch.uint8:
        return call(outputs, inputs, *options)
    return call([each[::-1] for each in outputs], inputs, *options)


@spoils("broadcast")
def sends_bytes_of_rank_0(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: bytes and lengths are broadcast from rank 0, whatever the root."""
    if tensors[0].dtype in (torch.uint8, torch.int64):
        options[0].rootRank = 0
    return call(tensors, *options)


@spoils("allgather")
def knows_lengths_of_the_world(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: in a group that is not the world every rank's length is its own."""
    work = finished(call(outputs, inputs, *options))
    if group.size() < dist.get_world_size() and inputs[0].dtype == torch.int64:
        for each in outputs[0]:
            each.copy_(inputs[0])
    return work


@spoils("gather", "scatter")
def turns_bytes_round(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: gather and scatter of bytes give each rank the tensor of the one behind it."""

    def turned(lists: Any) -> Any:
        return [[*each[1:], each[0]] if isinstance(each, list) else each for each in lists]

    return call(turned(outputs), turned(inputs), *options)


@spoils("recv")
def clips_bytes(group: Any, call: Any, tensors: Any, *rest: Any) -> Any:
    """BUG: of bytes that were sent the last one is lost."""
    work = finished(call(tensors, *rest))
    if tensors[0].dtype == torch.uint8:
        tensors[0].view(-1)[-1] = 0
    return work


@spoils("broadcast")
def loses_the_second_page(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of bytes from another root than rank 0 those behind the first 4096 are zero, as far as 8192."""
    work = finished(call(tensors, *options))
    if tensors[0].dtype == torch.uint8 and options[0].rootRank:
        tensors[0].view(-1)[4096:8192] = 0
    return work
