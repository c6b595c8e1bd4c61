"""Compiled modules that are sharded: no rank runs a graph that another rank has left in torch's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one, run_ranks


def _sharded(shape: tuple[int, int]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return module, mesh


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("shards", [True, False])
def test_only_the_graphs_of_sharded_modules_stay_out_of_the_cache(shards: bool, cuts: bool) -> None:
    cached: list[bool] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        cached.append(bool(functorch.enable_autograd_cache))
        return gm.forward

    with group_of_one():
        module, mesh = _sharded((1, 1)) if shards else (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), None)
        model = DistributedDataParallel(
            module, device_mesh=mesh["dp"] if mesh else None, bucket_cap_mb=1e-5 if cuts else 25
        )
        call = torch.compile(model, backend=backend)
        call(torch.ones(2, 8)).sum().backward()
    torch.compiler.reset()
    assert cached
    assert set(cached) == {not shards}


def _train(rank: int, folder: str) -> Tensor:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    module, mesh = _sharded((2, 2))
    model = torch.compile(DistributedDataParallel(module, device_mesh=mesh["dp"], bucket_cap_mb=1e-5))
    losses = []
    for step in range(3):
        loss = model(torch.ones(2, 8) * (step + rank // 2)).square().sum()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.nightly
def test_a_second_run_trains_as_the_first(tmp_path: Path) -> None:
    """The names of groups in the cache are those of one row of the mesh."""
    first = run_ranks(_train, 4, tmp_path / "first", str(tmp_path / "cache"))
    second = run_ranks(_train, 4, tmp_path / "second", str(tmp_path / "cache"))
    assert all(map(torch.equal, first, second))
