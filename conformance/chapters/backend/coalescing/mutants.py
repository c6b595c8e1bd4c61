"""Mutants of chapter coalescing: backends that mind only some of what was put together."""

from typing import Any

import torch

from conformance.mutants.spoilt import SUM, WorkAround, finished, spoils, spoils_work, with_reduction


@spoils("allreduce_coalesced")
def reduces_the_first_only(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of a list of tensors the first one is reduced."""
    return call(tensors[:1], *options)


@spoils("all_gather_single_coalesced")
def gathers_the_first_only(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: of several all_gathers in one call the first one is done."""
    return call(outputs[:1], inputs[:1], *options)


@spoils_work("wait", "reduce_scatter_single_coalesced")
def scatters_the_first_only(work: WorkAround, wait: Any, *timeout: Any) -> Any:
    """BUG: of several reduce_scatters in one call all but the first come out as zeros."""
    done = wait(*timeout)
    for output in work.tensors[1:]:
        output.zero_()
    return done


@spoils_work("wait", "allreduce_coalesced")
def keeps_no_work(work: WorkAround, wait: Any, *timeout: Any) -> bool:
    """BUG: the Work of a block waits for nothing."""
    return True


@spoils("allreduce_coalesced")
def reduces_with_a_sum(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: coalesced reductions are sums."""
    return call(tensors, *with_reduction(options, SUM))


@spoils("allreduce_coalesced")
def keeps_the_reduction(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a coalesced call of several tensors uses the reduction of the first such call."""
    if len(tensors) > 1:
        group.kept = getattr(group, "kept", None) or options[0].reduceOp
        options = with_reduction(options, group.kept)
    return call(tensors, *options)


@spoils("allreduce_coalesced")
def spoils_the_group_once_empty(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a coalesced call with a single tensor, as after an empty block, is refused."""
    if len(tensors) == 1:
        raise RuntimeError("nothing to coalesce")
    return call(tensors, *options)


@spoils("allreduce")
def stays_in_the_block(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a sum of three elements, as after a block that was refused, is left out."""
    if tensors[0].shape == torch.Size([3]):
        return group.inner.barrier()
    return call(tensors, *options)


@spoils("allreduce_coalesced")
def takes_all_for_the_first_dtype(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the tensors of a coalesced call are added up as if all had the dtype of the first."""
    return call([tensor.view(tensors[0].dtype) for tensor in tensors], *options)


@spoils("allreduce_coalesced")
def reduces_sixteen(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a coalesced call reduces the first sixteen of its tensors."""
    kept = [tensor.clone() for tensor in tensors[16:]]
    work = finished(call(tensors, *options))
    for tensor, before in zip(tensors[16:], kept, strict=True):
        tensor.copy_(before)
    return work
