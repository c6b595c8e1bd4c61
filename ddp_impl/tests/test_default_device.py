"""Whatever device is the user's default one, tensors of ours are where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import run_ranks


class Half(nn.Module):
    """Two layers, of which forward uses one or both, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("statistics", torch.zeros(2))

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        output: Tensor = self.one(inputs) + (self.other(inputs) if both else 0)
        return output


def trained_under_meta(rank: int, options: dict[str, Any]) -> list[Tensor | None]:
    ddp = DistributedDataParallel(Half(), **options)
    inputs = torch.full((1, 2), rank + 1.0)
    torch.set_default_device("meta")
    try:
        for step in range(3):
            ddp.zero_grad()
            ddp(inputs, step < 2).sum().backward()
        with ddp.join():
            for _ in range(2 + rank):
                ddp(inputs, True).sum().backward()
        ddp.reducer._get_local_used_map()
        DistributedDataParallel(ddp.module, **options)
    finally:
        torch.set_default_device(None)
    return [parameter.grad for parameter in ddp.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {"find_unused_parameters": True, "bucket_cap_mb": "auto"},
    ],
    ids=["find", "skip", "auto"],
)
def test_a_default_device_that_is_set_after_wrapping_changes_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    for gradients in run_ranks(trained_under_meta, 2, tmp_path, options):
        assert all(gradient is not None and not gradient.is_meta for gradient in gradients)
