"""A program about the bits of sums: the same on all ranks, and the same again."""

import hashlib
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from conformance.checkers.explanation import ranks
from conformance.observation import Facts
from conformance.programs.judged import first_wrong
from conformance.programs.operations.data import dtype_of
from conformance.programs.operations.groups import Groups, members_of, whose
from conformance.programs.operations.store_messages import all_texts
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Right

_SAME = "the bits of inexact sums"
_AGAIN = "the bits of the same sums again"
#: Backends choose a way to add up by the number of elements, and by who takes part.
_SIZES = (1, 31, 1000, 4099, 65_537, 2**20)
#: More takes long in every group, by every call.
_MOST_IN_GROUPS = 65_537
_GROUPS = ("world", "permuted", "without-0")
#: Calls, and what a backend must declare for each.
_CALLS = {"all_reduce SUM": "", "all_reduce AVG": "avg", "coalesced all_reduce SUM": "coalesced"}


@program_without_truth(
    "same_bits_everywhere", invariants=(), speaks_for={_SAME: ("VAL-02",), _AGAIN: ("VAL-18",)}, without_ddp=True
)
def same_bits_everywhere(ctx: RankContext) -> None:
    """Sum numbers whose sum depends on the order; observes whether ranks agree, and twice. All ranks run it."""
    numbers = _numbers(ctx)
    groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device)
    same = again = ""
    calls = [call for call, needs in _CALLS.items() if not needs or needs in ctx.declared]
    for numel, name, call in product(_SIZES, _GROUPS, calls):
        if numel > _MOST_IN_GROUPS and (name, call) != (_GROUPS[0], calls[0]):
            continue
        group, members = groups.get(name), members_of(name, ctx.rank, ctx.world_size)
        if ctx.rank not in members:
            continue
        what = f"{call} of {numel} elements in {'the world' if name == 'world' else f'a group of {whose(name)}'}"
        with ctx.phase(what):
            digest, second = (_digest(_summed(group, call, numbers[:numel])) for _ in range(2))
            everybody = zip(members, all_texts(what, digest, ctx.rank, members), strict=True)
        others = [rank for rank, theirs in everybody if theirs != digest]
        same = first_wrong(same, f"{what} gave {ranks(others)} other bits than rank {ctx.rank}" if others else "")
        again = first_wrong(again, "" if digest == second else f"a second {what}, the same, gave other bits")
    groups.destroy()
    ctx.observe(_SAME, same)
    ctx.observe(_AGAIN, again)


@same_bits_everywhere.expects
def _same_bits_everywhere(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {_SAME: Right(), _AGAIN: Right()} for rank in range(scenario.world_size)}


def _numbers(ctx: RankContext) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + ctx.rank)
    exponents = torch.randint(-30, 30, _SIZES[-1:], generator=generator)
    numbers = torch.rand(_SIZES[-1:], generator=generator, dtype=torch.float64) * 2.0**exponents
    return numbers.to(dtype_of(str(ctx.arguments["dtype"]))).to(ctx.device)


def _summed(group: Any, call: str, tensor: Tensor) -> Tensor:
    total = tensor.clone()
    if call.startswith("coalesced"):
        group.allreduce_coalesced([total], c10d.AllreduceCoalescedOptions()).wait()
    else:
        dist.all_reduce(total, getattr(dist.ReduceOp, call.rpartition(" ")[2]), group=group)
    return total.cpu()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
