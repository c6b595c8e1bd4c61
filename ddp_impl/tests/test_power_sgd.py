"""torch's PowerSGD hook with more buckets than gloo has threads: it waits for collectives in their callbacks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import run_ranks


def called_by_users(state: PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    return powerSGD_hook(state, bucket)


HOOKS: dict[str, Any] = {
    "plain": powerSGD_hook,
    "fp16": fp16_compress_wrapper(powerSGD_hook),
    "nested": bf16_compress_wrapper(fp16_compress_wrapper(partial(powerSGD_hook))),
    "by its state": called_by_users,
}


def train(rank: int, name: str) -> None:
    layers = [nn.Linear(512, 512, bias=False) for _ in range(6)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1), HOOKS[name])
    for _ in range(5):
        ddp.zero_grad()
        ddp(torch.ones(4, 512) * (rank + 1)).sum().backward()
    for layer in layers:
        gradients = [torch.empty_like(layer.weight) for _ in range(2)]
        dist.all_gather(gradients, layer.weight.grad)
        assert gradients[0].equal(gradients[1])


@pytest.mark.parametrize("name", HOOKS)
def test_six_buckets_do_not_wait_for_each_other(name: str, tmp_path: Path) -> None:
    run_ranks(partial(train, name=name), 2, tmp_path / "ranks")
