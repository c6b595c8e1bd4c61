"""Mutants of chapter reductions: backends that reduce in another way than they were asked to."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from conformance.backends.backend import Backend
from conformance.mutants.premul import PREMUL, Multiplies
from conformance.mutants.spoilt import (
    BOR,
    MAX,
    SUM,
    WorkAround,
    finished,
    made_from,
    reduction,
    spoils,
    with_reduction,
)

_REDUCING = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_single", "allreduce_coalesced")


def _does_instead(asked: str, done: Any, name: str, bug: str) -> Backend:
    """Return a backend that does the reduction `done` where `asked` is asked for."""

    def spoil(group: Any, call: Any, *args: Any) -> Any:
        *tensors, options = args
        return call(*tensors, *with_reduction((options,), done) if reduction((options,)) == asked else (options,))

    spoil.__name__, spoil.__doc__ = name, bug
    return spoils(*_REDUCING)(spoil)


takes_band_for_sum = _does_instead("BAND", SUM, "takes_band_for_sum", "BUG: BAND is done as SUM.")
takes_bor_for_sum = _does_instead("BOR", SUM, "takes_bor_for_sum", "BUG: BOR is done as SUM.")
takes_bxor_for_sum = _does_instead("BXOR", SUM, "takes_bxor_for_sum", "BUG: BXOR is done as SUM.")
takes_bxor_for_bor = _does_instead("BXOR", BOR, "takes_bxor_for_bor", "BUG: BXOR is done as BOR.")
takes_product_for_max = _does_instead("PRODUCT", MAX, "takes_product_for_max", "BUG: PRODUCT is done as MAX.")
takes_product_for_sum = _does_instead("PRODUCT", SUM, "takes_product_for_sum", "BUG: PRODUCT is done as SUM.")
takes_min_for_max = _does_instead("MIN", MAX, "takes_min_for_max", "BUG: MIN is done as MAX.")


@spoils("allreduce")
def begins_max_at_zero(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a MAX begins at zero, so that negative ones come out as zero."""
    work = finished(call(tensors, *options))
    if reduction(options) == "MAX" and not tensors[0].is_complex():
        tensors[0].clamp_(min=0)
    return work


@spoils("reduce")
def ignores_signs_in_min(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: the MIN of a reduce is that of magnitudes."""
    if reduction(options) == "MIN" and tensors[0].dtype != torch.bool:
        tensors[0].abs_()
    return call(tensors, *options)


@spoils("allreduce")
def truncates_averages(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: averages are rounded towards multiples of 4, as by a division of integers."""
    work = finished(call(tensors, *options))
    if reduction(options) == "AVG" and tensors[0].is_floating_point():
        tensors[0].div_(4).trunc_().mul_(4)
    return work


@spoils("reduce_scatter")
def averages_lists_as_integers(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: the AVG of a reduce_scatter of lists divides as integers do."""
    work = finished(call(outputs, inputs, *options))
    if reduction(options) == "AVG" and outputs[0].is_floating_point():
        outputs[0].trunc_()
    return work


@spoils("reduce")
def sums_as_integers(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a reduce makes integers of what it adds up."""
    work = finished(call(tensors, *options))
    if reduction(options) == "SUM" and tensors[0].is_floating_point():
        tensors[0].trunc_()
    return work


@spoils("allreduce", "allreduce_coalesced")
def forgets_to_divide(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: AVG is the sum."""
    return call(tensors, *with_reduction(options, SUM) if reduction(options) == "AVG" else options)


@spoils("allreduce")
def averages_integers_to_zero(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: AVG of integers multiplies them by a factor of 1/n, which is 0."""
    if reduction(options) == "AVG" and not tensors[0].is_floating_point():
        tensors[0].zero_()
        return group.inner.barrier()
    return call(tensors, *options)


@spoils(*_REDUCING)
def divides_by_the_world(group: Any, call: Any, *args: Any) -> Any:
    """BUG: AVG divides by the size of the world, in small groups, too."""
    work = finished(call(*args))
    if reduction(args[-1:]) == "AVG":
        outputs = args[0] if isinstance(args[0], list) else [args[0]]
        for each in outputs:
            each.mul_(group.size()).div_(dist.get_world_size())
    return work


@spoils("allreduce")
def divides_by_elements(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: AVG divides by the number of elements, too."""
    work = finished(call(tensors, *options))
    if reduction(options) == "AVG" and tensors[0].is_floating_point() and tensors[0].numel():
        tensors[0].div_(tensors[0].numel())
    return work


@spoils("allreduce")
def halves_the_tail_of_one_rank(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: in a group of one rank the last 8 elements of an AVG of bfloat16 come out halved."""
    work = finished(call(tensors, *options))
    if reduction(options) == "AVG" and group.size() == 1 and tensors[0].dtype == torch.bfloat16:
        tensors[0].view(-1)[-8:] *= 0.5
    return work


def _drops_the_reduction(method: str, name: str, bug: str) -> Backend:
    """Return a backend that sums in one method, whatever is asked for."""

    def spoil(group: Any, call: Any, *args: Any) -> Any:
        *tensors, options = args
        return call(*tensors, *with_reduction((options,), SUM))

    spoil.__name__, spoil.__doc__ = name, bug
    return spoils(method)(spoil)


drops_it_in_reduce = _drops_the_reduction("reduce", "drops_it_in_reduce", "BUG: a reduce sums, whatever is asked for.")
drops_it_in_lists = _drops_the_reduction(
    "reduce_scatter", "drops_it_in_lists", "BUG: a reduce_scatter of lists sums, whatever is asked for."
)
drops_it_in_reduce_scatter_single = _drops_the_reduction(
    "reduce_scatter_single", "drops_it_in_reduce_scatter_single", "BUG: reduce_scatter_single sums in any case."
)
drops_it_in_coalesced = _drops_the_reduction(
    "allreduce_coalesced", "drops_it_in_coalesced", "BUG: a coalesced all_reduce sums, whatever is asked for."
)
drops_it_in_coalesced_scatters = _drops_the_reduction(
    "reduce_scatter_single_coalesced", "drops_it_in_coalesced_scatters",
    "BUG: a coalesced reduce_scatter sums, whatever is asked for.",
)  # fmt: skip


@spoils("allreduce")
def sums_where_it_cannot(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: bitwise operations of floating-point numbers are done as sums."""
    bitwise = reduction(options) in ("BAND", "BOR", "BXOR") and tensors[0].is_floating_point()
    return call(tensors, *with_reduction(options, SUM) if bitwise else options)


@spoils("allreduce")
def flushes_sums_of_half_precision(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: an all_reduce of float16 makes zeros of subnormal sums."""
    work = finished(call(tensors, *options))
    for each in tensors:
        if each.dtype == torch.float16:
            each[each.abs() < torch.finfo(each.dtype).tiny] = 0
    return work


@spoils("allreduce")
def hides_nans(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: sums that are no numbers come out as zero."""
    work = finished(call(tensors, *options))
    if tensors[0].is_floating_point() and not tensors[0].is_sparse:
        torch.nan_to_num_(tensors[0], nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return work


@spoils("allreduce")
def saturates(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a sum of float16 that is too large becomes the greatest number, and a GradScaler sees no infinity."""
    sums = [each.double() for each in tensors if each.dtype == torch.float16 and reduction(options) == "SUM"]
    for exact in sums:
        finished(group.inner.allreduce([exact], *options))
    work = finished(call(tensors, *options))
    for each, exact in zip(tensors, sums, strict=False):
        most = torch.finfo(each.dtype).max
        each.copy_(torch.where(exact.isfinite(), exact.clamp(-most, most), exact))
    return work


def _sums_wide(name: str, dtype: torch.dtype, narrow: Callable[[torch.Tensor], torch.Tensor], bug: str) -> Backend:
    """Return a backend whose all_reduce of a `dtype` sums float32, and makes that of it what `narrow` does."""

    def spoil(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
        if tensors[0].dtype != dtype or reduction(options) != "SUM":
            return call(tensors, *options)
        wide = [each.float() for each in tensors]
        work = finished(call(wide, *options))
        for each, exact in zip(tensors, wide, strict=True):
            each.copy_(narrow(exact))
        return work

    spoil.__name__, spoil.__doc__ = name, bug
    return spoils("allreduce")(spoil)


cuts_bfloat16_off = _sums_wide(
    "cuts_bfloat16_off", torch.bfloat16, lambda exact: (exact.view(torch.int32) & ~0xFFFF).view(torch.float32),
    "BUG: an all_reduce makes bfloat16 of sums by leaving out the last 16 bits.",
)  # fmt: skip
rounds_halves_up = _sums_wide(
    "rounds_halves_up", torch.bfloat16,
    lambda exact: exact.where(~exact.isfinite(), (exact.view(torch.int32) + 0x8000 & ~0xFFFF).view(torch.float32)),
    "BUG: an all_reduce of bfloat16 rounds halves away from zero.",
)  # fmt: skip
overflows_early = _sums_wide(
    "overflows_early", torch.float16, lambda exact: torch.where(exact.abs() > 65504, exact * torch.inf, exact),
    "BUG: a sum of float16 just above the greatest number, which is the nearest, is infinite.",
)  # fmt: skip


@spoils("allreduce")
def begins_at_the_least_number(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a MAX begins at the least finite number, and knows no infinity below it."""
    work = finished(call(tensors, *options))
    if reduction(options) == "MAX":
        for each in tensors:
            if each.is_floating_point():
                each.clamp_(min=torch.finfo(each.dtype).min)
    return work


@spoils("allreduce")
def sums_at_its_own_places(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of a sum of sparse tensors each rank gets the places alone that it has itself."""
    (tensor,) = tensors
    if not tensor.is_sparse:
        return call(tensors, *options)
    mine = tensor.coalesce().indices()
    work = finished(call(tensors, *options))
    tensor.copy_(torch.sparse_coo_tensor(mine, tensor.to_dense()[tuple(mine)], tensor.shape))
    return work


@spoils("allreduce")
def takes_the_first_rank_for_empty(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: where a rank's sparse tensor has no places, it takes the whole sum for empty."""
    (tensor,) = tensors
    if not tensor.is_sparse or tensor._nnz():
        return call(tensors, *options)
    none = tensor.clone()
    work = finished(call(tensors, *options))
    tensor.copy_(none)
    return work


class _NoWait(WorkAround):
    def wait(self, *timeout: Any) -> bool:
        return True


@spoils("allreduce")
def waits_for_no_sparse_sum(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: wait() of a sum of sparse tensors returns at once."""
    return _NoWait(call(tensors, *options)) if tensors[0].is_sparse else call(tensors, *options)


@made_from(PREMUL)
class rounds_its_factor(Multiplies):
    """BUG: PREMUL_SUM multiplies by a factor that was made a whole number."""

    def multiplied(self, tensor: Any, factor: Any) -> Any:
        return tensor * int(factor)


@made_from(PREMUL)
class reads_no_tensor_as_factor(Multiplies):
    """BUG: where the factor of PREMUL_SUM is a tensor, it multiplies by one."""

    def multiplied(self, tensor: Any, factor: Any) -> Any:
        return tensor * (1 if isinstance(factor, torch.Tensor) else factor)


@made_from(PREMUL)
class loses_the_sign_of_its_factor(Multiplies):
    """BUG: PREMUL_SUM of bfloat16 multiplies by the factor's magnitude."""

    def multiplied(self, tensor: Any, factor: Any) -> Any:
        return tensor * (abs(factor) if tensor.dtype == torch.bfloat16 else factor)


@made_from(PREMUL)
class multiplies_what_it_is_given(Multiplies):
    """BUG: PREMUL_SUM multiplies a reduce_scatter's input where it lies, in the caller's memory."""

    def multiplied(self, tensor: Any, factor: Any) -> Any:
        return tensor.mul_(factor)


@made_from(PREMUL)
class multiplies_on_one_rank(Multiplies):
    """BUG: in PREMUL_SUM rank 1 does not multiply."""

    def multiplied(self, tensor: Any, factor: Any) -> Any:
        return tensor * 1 if self.rank() == 1 else tensor * factor
