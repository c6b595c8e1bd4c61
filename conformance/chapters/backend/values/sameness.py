"""A program about the bits of sums: the same on all ranks, and the same again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.checkers.explanation import ranks
from conformance.observation import Facts
from conformance.programs.operations.data import dtype_of
from conformance.programs.operations.hearsay import told
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.scenario import Scenario
from conformance.truth.expected import Right

_SAME = "the bits of an inexact all_reduce"
_AGAIN = "the bits of the same all_reduce again"


@program("same_bits_everywhere", invariants=(), speaks_for={_SAME: ("VAL-02",), _AGAIN: ("VAL-18",)}, without_ddp=True)
def same_bits_everywhere(ctx: RankContext) -> None:
    """Sum numbers whose sum depends on the order; observes whether ranks agree, and twice. All ranks run it."""
    generator = torch.Generator().manual_seed(1000 + ctx.rank)
    shape, dtype = (int(ctx.arguments["numel"]),), dtype_of(str(ctx.arguments["dtype"]))
    exponents = torch.randint(-30, 30, shape, generator=generator)
    numbers = torch.rand(shape, generator=generator, dtype=torch.float64) * 2.0**exponents
    digests = [_digest(_summed(ctx, numbers.to(dtype))) for _ in range(2)]
    everybody = told("digest", digests[0], ctx.rank, range(ctx.world_size))
    others = [rank for rank, digest in enumerate(everybody) if digest != digests[0]]
    ctx.observe(_SAME, f"all_reduce SUM gave {ranks(others)} other bits than rank {ctx.rank}" if others else "")
    ctx.observe(_AGAIN, "" if len(set(digests)) == 1 else "a second all_reduce SUM of the same tensors gave other bits")


@same_bits_everywhere.expects
def _same_bits_everywhere(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {_SAME: Right(), _AGAIN: Right()} for rank in range(scenario.world_size)}


def _summed(ctx: RankContext, tensor: Tensor) -> Tensor:
    total = tensor.to(ctx.device, copy=True)
    dist.all_reduce(total, group=ctx.process_group)
    return total.cpu()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
