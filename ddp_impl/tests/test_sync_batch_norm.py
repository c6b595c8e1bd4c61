"""Batch normalisation over ranks, compared with one module that has the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel, SyncBatchNorm
from ddp_impl.tests.ranks import run_ranks

WORLD_SIZE = 3
STEPS = 3

#: Rows that each rank has, by step: as many as the others, other numbers, and none at all.
ROWS = ((4, 4, 4), (2, 5, 3), (3, 0, 4))


def build(dims: int, momentum: float | None = 0.1, affine: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3, momentum=momentum, affine=affine) if dims < 3 else nn.BatchNorm2d(3, momentum=momentum)
    first = nn.Linear(2, 3) if dims < 3 else nn.Conv2d(2, 3, 1)
    return nn.Sequential(first, layer)


def batch(rank: int, step: int, dims: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    shape = (ROWS[step][rank], 2, *(2, 3)[: dims - 2])
    return torch.randn(shape, generator=generator) * 3 + 100  # far from 0, where differences of sums lose digits


def train_over_ranks(rank: int, dims: int, options: dict[str, Any]) -> dict[str, Any]:
    module = SyncBatchNorm.convert_sync_batchnorm(build(dims, **options))
    ddp = DistributedDataParallel(module, forward_sync_buffers=False)
    gradients = []
    for step in range(STEPS):
        module.zero_grad()
        ddp(batch(rank, step, dims)).pow(3).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
    module.eval()
    return {"gradients": gradients, "state": module.state_dict(), "evaluated": ddp(batch(0, 0, dims))}


@pytest.mark.parametrize(
    ("dims", "options"),
    [(2, {}), (4, {}), (2, {"momentum": None}), (2, {"affine": False})],
    ids=["rows", "images", "cumulative", "plain"],
)
def test_ranks_normalise_as_one_module_does_that_has_the_whole_batch(
    tmp_path: Path, dims: int, options: dict[str, Any]
) -> None:
    whole = build(dims, **options)
    truth = []
    for step in range(STEPS):
        whole.zero_grad()
        whole(torch.cat([batch(rank, step, dims) for rank in range(WORLD_SIZE)])).pow(3).sum().backward()
        truth.append([parameter.grad / WORLD_SIZE for parameter in whole.parameters() if parameter.grad is not None])
    whole.eval()
    for found in run_ranks(train_over_ranks, WORLD_SIZE, tmp_path / "ranks", dims, options):
        # What is summed in another order differs in its last digits: of numbers near 100, or of gradients near 1000.
        torch.testing.assert_close(found["gradients"], truth, rtol=1e-4, atol=2e-2)
        torch.testing.assert_close(dict(found["state"]), dict(whole.state_dict()), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["evaluated"], whole(batch(0, 0, dims)), rtol=1e-4, atol=1e-4)


def normalise_in_a_group_without_rank_2(rank: int) -> tuple[Tensor, Tensor]:
    layer = SyncBatchNorm(2, affine=False, process_group=dist.new_group([0, 1])).double()
    rows = batch(rank, 0, 2).double().requires_grad_()
    output = layer(rows)
    output.pow(3).sum().backward()
    assert rows.grad is not None
    return output.detach(), rows.grad


def test_a_group_normalises_its_own_ranks_batches_and_who_is_outside_its_own(tmp_path: Path) -> None:
    found = run_ranks(normalise_in_a_group_without_rank_2, 3, tmp_path / "ranks")
    for together in ([0, 1], [2]):
        rows = torch.cat([batch(rank, 0, 2) for rank in together]).double().requires_grad_()
        output = nn.BatchNorm1d(2, affine=False).double()(rows)
        output.pow(3).sum().backward()
        torch.testing.assert_close(torch.cat([found[rank][0] for rank in together]), output.detach())
        torch.testing.assert_close(torch.cat([found[rank][1] for rank in together]), rows.grad)


def one_value(rank: int) -> None:
    layer = SyncBatchNorm(2)
    with pytest.raises(RuntimeError, match="expects more than 1 value per feature over all ranks, got 1"):
        layer(torch.ones(1 if rank == 0 else 0, 2))
    torch.testing.assert_close(layer(torch.full((1, 2), float(rank))).abs(), torch.full((1, 2), 1.0), rtol=0, atol=1e-4)


def test_one_value_on_all_ranks_together_is_refused_on_each(tmp_path: Path) -> None:
    run_ranks(one_value, 2, tmp_path / "ranks")


def test_alone_it_is_ordinary_batch_normalisation() -> None:
    for momentum in (0.1, None):
        plain = build(2, momentum)
        converted = SyncBatchNorm.convert_sync_batchnorm(build(2, momentum))
        assert isinstance(converted[1], SyncBatchNorm)  # type: ignore[index]
        for step in range(2):
            assert torch.equal(converted(batch(0, step, 2)), plain(batch(0, step, 2)))
        for name, value in plain.state_dict().items():
            assert torch.equal(converted.state_dict()[name], value), name


def test_converting_keeps_parameters_and_mode() -> None:
    module = build(2).eval()
    before = dict(module.named_parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(module)
    assert converted is module
    assert all(parameter is before[name] for name, parameter in converted.named_parameters())
    assert not any(part.training for part in converted.modules())


def refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"ddp_impl\.SyncBatchNorm"):
        DistributedDataParallel(nn.SyncBatchNorm(2))
    assert dist.is_initialized()


def test_the_layer_that_cannot_train_here_is_refused_with_the_one_that_can(tmp_path: Path) -> None:
    run_ranks(refused, 1, tmp_path / "ranks")


def _differentiates_twice(rank: int) -> list[str]:
    module = SyncBatchNorm.convert_sync_batchnorm(build(2))
    rows = batch(rank, 0, 2).requires_grad_()
    said = []
    for of in (rows, module[1].weight):  # type: ignore[index]
        (gradient,) = torch.autograd.grad(module(rows).pow(2).sum(), of, create_graph=True)
        with pytest.raises(RuntimeError, match="a gradient of a gradient through ddp_impl") as caught:
            gradient.square().sum().backward()
        said.append(str(caught.value))
    (first,) = torch.autograd.grad(module(rows).pow(2).sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(module(rows).pow(2).sum(), rows)
    assert torch.equal(first, second)
    return said


def test_a_gradient_of_a_gradient_is_refused(tmp_path: Path) -> None:
    assert all(map(len, run_ranks(_differentiates_twice, WORLD_SIZE, tmp_path / "ranks")))
