"""Buffers of dtypes that no backend has a number for are copied all the same."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import run_ranks

DTYPES = (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bits8)


def values(rank: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(16, dtype=torch.uint8) + 100 * rank).view(dtype)


def bytes_after_wrapping(rank: int) -> list[list[int]]:
    module = nn.Linear(2, 2)
    for index, dtype in enumerate(DTYPES):
        module.register_buffer(f"alone{index}", values(rank, dtype))
    module.register_buffer("neighbour", values(rank, torch.int16))
    module.register_buffer("transposed", values(rank, torch.int16).view(2, 4).t())
    DistributedDataParallel(module)
    return [buffer.t().contiguous().view(torch.uint8).flatten().tolist() for _, buffer in module.named_buffers()]


def test_buffers_travel_as_bytes_where_no_backend_knows_their_dtype(tmp_path: Path) -> None:
    first, second = run_ranks(bytes_after_wrapping, 2, tmp_path)
    assert first == second == [list(range(16))] * (len(DTYPES) + 2)
