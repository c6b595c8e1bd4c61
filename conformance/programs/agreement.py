"""Lets ranks check among themselves whether they hold the same bits."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.rank_context import RankContext


def same_bits_everywhere(ctx: RankContext, tensors: Sequence[Tensor]) -> bool:
    """Return whether every rank holds the bits of rank 0 in `tensors`, which are dense and of one dtype.

    0.0 and -0.0 differ, and equal NaNs agree. All ranks must call it; it gathers the tensors once.
    """
    mine = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).contiguous()
    gathered = [torch.empty_like(mine) for _ in range(ctx.world_size)]
    dist.all_gather(gathered, mine, group=ctx.process_group)
    first, *others = (each.view(torch.uint8) for each in gathered)
    return all(torch.equal(first, other) for other in others)
