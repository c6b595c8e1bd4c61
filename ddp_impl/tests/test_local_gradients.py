"""Gradients that stay local: the user reads of it once where nothing says that it is meant."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import run_ranks


def past_the_wrapper(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    ddp.module(x).sum().backward()


def a_layer_after_the_step(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    ddp(x).sum().backward()
    next(ddp.module.children())(x).sum().backward()


def called(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    ddp(x).sum().backward()


def meant(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    with ddp.no_sync():
        ddp(x).sum().backward()


def meant_behind_the_step(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    with ddp.no_sync():
        local = ddp(x).sum()
    ddp(x).sum().backward()
    local.backward()


def twice(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    loss = ddp(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def averaged_in_graph(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        torch.compile(ddp, backend="aot_eager")(x).sum().backward()


def gradient_of_input(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    torch.autograd.grad(ddp.module(x.requires_grad_()).sum(), x)


def train(rank: int, step: Callable[[DistributedDataParallel, torch.Tensor], None]) -> list[str]:
    """Take three steps; return what was warned of, on any rank."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(ddp, torch.ones(2, 3))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("step", [past_the_wrapper, a_layer_after_the_step])
def test_a_loss_that_goes_past_the_wrapper_is_reported_once(step: Callable[..., None], tmp_path: Path) -> None:
    for rank, [warning] in enumerate(run_ranks(train, 2, tmp_path, step)):
        assert f"[rank {rank}] after iteration" in warning
        assert "ddp.no_sync()" in warning


@pytest.mark.parametrize("step", [called, meant, meant_behind_the_step, twice, averaged_in_graph, gradient_of_input])
def test_gradients_that_are_averaged_or_meant_to_be_local_are_not(step: Callable[..., None], tmp_path: Path) -> None:
    assert run_ranks(train, 2, tmp_path, step) == [[], []]


def test_one_rank_has_nobody_to_average_with(tmp_path: Path) -> None:
    assert run_ranks(train, 1, tmp_path, past_the_wrapper) == [[]]
