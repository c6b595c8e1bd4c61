"""Mutants of chapter dtypes: backends that take one dtype for another, or say nothing of what they cannot do."""

from typing import Any

import torch

from conformance.mutants.spoilt import WorkDone, finished, reduction, spoils


def _copied_through(call: Any, outputs: Any, inputs: Any, options: Any, wide: torch.dtype, narrow: torch.dtype) -> Any:
    work = finished(call(outputs, inputs, *options))
    for each in outputs[0]:
        if each.dtype == wide:
            each.copy_(each.to(narrow))
    return work


@spoils("allgather")
def gathers_doubles_as_floats(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: float64 travels as float32 in an all_gather."""
    return _copied_through(call, outputs, inputs, options, torch.float64, torch.float32)


@spoils("allreduce")
def sums_integers_as_doubles(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: int64 is summed in float64, which has 53 bits."""
    if tensors[0].dtype != torch.int64 or reduction(options) != "SUM":
        return call(tensors, *options)
    wide = tensors[0].double()
    work = finished(call([wide], *options))
    tensors[0].copy_(wide)
    return work


@spoils("scatter")
def scatters_int32_as_floats(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: int32 goes through float32 in a scatter."""
    work = finished(call(outputs, inputs, *options))
    if outputs[0].dtype == torch.int32:
        outputs[0].copy_(outputs[0].float() * 1.0)
    return work


@spoils("all_to_all_single")
def takes_bfloat16_for_nothing(group: Any, call: Any, output: Any, sent: Any, *rest: Any) -> Any:
    """BUG: an element of bfloat16 has 0 bytes in all_to_all_single with splits, so that nothing arrives."""
    before = output.clone()
    work = finished(call(output, sent, *rest))
    if output.dtype == torch.bfloat16 and rest and rest[0]:
        output.copy_(before)
    return work


@spoils("allreduce")
def refuses_long_bfloat16(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the algorithm for long tensors refuses bfloat16."""
    if tensors[0].dtype == torch.bfloat16 and tensors[0].numel() > 1000:
        raise RuntimeError("bfloat16 is not supported by the ring")
    return call(tensors, *options)


@spoils("reduce_scatter")
def sums_halves_as_bfloat16(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: a reduce_scatter of float16 is rounded to bfloat16."""
    work = finished(call(outputs, inputs, *options))
    if outputs[0].dtype == torch.float16:
        outputs[0].copy_(outputs[0].bfloat16())
    return work


@spoils("allreduce")
def saturates_bytes(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: sums of uint8 stop at 255."""
    if tensors[0].dtype != torch.uint8 or reduction(options) != "SUM":
        return call(tensors, *options)
    wide = tensors[0].int()
    work = finished(call([wide], *options))
    tensors[0].copy_(wide.clamp(max=255))
    return work


@spoils("reduce")
def takes_int8_for_unsigned(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a reduce of int8 halves negative results, as if they were large."""
    work = finished(call(tensors, *options))
    if tensors[0].dtype == torch.int8 and group.rank() == options[0].rootRank:
        tensors[0][tensors[0] < 0] //= 2
    return work


@spoils("allgather")
def inverts_bools(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_gather turns truth values round."""
    work = finished(call(outputs, inputs, *options))
    for each in outputs[0]:
        if each.dtype == torch.bool:
            each.logical_not_()
    return work


@spoils("allreduce")
def averages_bools(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: AVG of bool is done as if it were something."""
    if tensors[0].dtype == torch.bool and reduction(options) == "AVG":
        return call([tensors[0].float()], *options)
    return call(tensors, *options)


@spoils("broadcast")
def loses_imaginary_parts(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the second of two numbers that make a complex one does not arrive in a broadcast."""
    one = tensors[0]
    before = one.clone()
    work = finished(call(tensors, *options))
    if one.dim() == 2 and one.shape[-1] == 2 and one.is_floating_point() and group.rank() != options[0].rootRank:
        one[..., 1] = before[..., 1]
    return work


@spoils("allreduce")
def sums_real_parts(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: complex numbers given straight to the group are summed in their real parts only."""
    if not tensors[0].is_complex():
        return call(tensors, *options)
    real = tensors[0].real.clone()
    work = finished(group.inner.allreduce([real]))
    tensors[0].real.copy_(real)
    return work


@spoils("allreduce")
def rounds_sums_roughly(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: sums of float16 are rounded to 7 bits."""
    work = finished(call(tensors, *options))
    if tensors[0].dtype == torch.float16:
        tensors[0].copy_(tensors[0].bfloat16())
    return work


@spoils("reduce")
def sums_long_complex_numbers_halfway(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a reduce of more than 50,000 complex numbers counts them, and not the two numbers in each."""
    one, half = tensors[0], tensors[0].numel() // 2
    if not one.is_complex() or half < 25_000:
        return call(tensors, *options)
    before = one.clone()
    work = finished(call(tensors, *options))
    one.view(-1)[half:] = before.view(-1)[half:]
    return work


@spoils("allreduce_coalesced")
def sums_real_parts_of_lists(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: complex numbers in a list that is given straight to the group are summed in their real parts only."""
    if not any(one.is_complex() for one in tensors):
        return call(tensors, *options)
    parts = [one.real.clone() for one in tensors]
    work = finished(call(parts, *options))
    for one, part in zip(tensors, parts, strict=True):
        one.real.copy_(part)
    return work


@spoils("allreduce")
def keeps_less_of_imaginary_parts(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of more than 2,000 complex numbers given straight to the group the imaginary parts are kept as float32."""
    one = tensors[0]
    if not one.is_complex():
        return call(tensors, *options)
    finished(call([torch.view_as_real(one)], *options))
    if one.numel() > 2000:
        one.imag.copy_(one.imag.float())
    return WorkDone()


@spoils("alltoall")
def conjugates_what_is_exchanged(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: an all_to_all of complex numbers given straight to the group conjugates them."""
    if not inputs[0].is_complex():
        return call(outputs, inputs, *options)
    finished(call(list(map(torch.view_as_real, outputs)), list(map(torch.view_as_real, inputs)), *options))
    for one in outputs:
        one.imag.neg_()
    return WorkDone()
