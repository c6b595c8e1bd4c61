"""Forwards on replicated views of the parameters: what they see, and that training goes on as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from ddp_impl import DistributedDataParallel
from ddp_impl.api.replicated_view import replicated_parameters
from ddp_impl.tests.ranks import run_ranks

WORLD_SIZE = 2


class Seen(nn.Module):
    """Layers that note what kind of weights their forward sees, on which storage."""

    def __init__(self, checkpointed: bool = False, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        """Make them; the last layer is computed again in backward if `checkpointed`."""
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), norm(6), nn.Linear(6, 2)
        self.checkpointed = checkpointed
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.weights = [self.first.weight, self.last.bias]
        hidden = self.norm(self.first(x))
        if self.checkpointed:
            return {"logits": checkpoint(self.tail, hidden, use_reentrant=False)}
        return {"logits": self.tail(hidden)}

    def tail(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.tanh(hidden))
        return logits


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def look(rank: int) -> None:
    module = Seen()
    ddp = DistributedDataParallel(module)
    parameters = dict(module.named_parameters())
    with replicated_parameters(ddp), replicated_parameters(ddp):
        ddp(inputs(rank, 0))["logits"].sum().backward()
        for weight, name in zip(module.weights, ("first.weight", "last.bias"), strict=True):
            assert isinstance(weight, DTensor)
            assert tuple(weight.placements) == (Replicate(),)
            assert weight.device_mesh.size() == WORLD_SIZE
            assert weight.to_local().data_ptr() == parameters[name].data_ptr()
        assert all(one is parameters[name] for name, one in module.named_parameters())
    ddp(inputs(rank, 1))["logits"].sum().backward()
    assert all(type(weight) is nn.Parameter for weight in module.weights)
    assert all(one is parameters[name] for name, one in module.named_parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    with pytest.raises(RuntimeError, match="mixed"):
        torch.ones(2) + DTensor.from_local(torch.ones(2), weight_mesh(), [Replicate()])


def weight_mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,))


def test_forward_alone_sees_replicated_views_of_the_same_storage(tmp_path: Path) -> None:
    run_ranks(look, WORLD_SIZE, tmp_path / "ranks")


class Failing(nn.Module):
    """Fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, fail: bool) -> Tensor:
        y: Tensor = self.layer(x)
        if fail:
            raise KeyError("told to")
        return y


def fail(rank: int) -> None:
    module = Failing()
    ddp = DistributedDataParallel(module)
    before = list(ddp.parameters())
    with pytest.raises(KeyError), replicated_parameters(ddp):
        ddp(torch.ones(1, 2), True)
    assert all(now is then for now, then in zip(ddp.parameters(), before, strict=True))
    with replicated_parameters(ddp):
        ddp(torch.full((1, 2), rank + 1.0), False).sum().backward()
    assert module.layer.weight.grad is not None
    assert module.layer.weight.grad.tolist() == [[1.5, 1.5], [1.5, 1.5]]


def test_parameters_are_put_back_when_a_forward_raises(tmp_path: Path) -> None:
    run_ranks(fail, WORLD_SIZE, tmp_path / "ranks")


def ignore(rank: int) -> None:
    module = Seen()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["first.weight"])
    ddp = DistributedDataParallel(module)
    with replicated_parameters(ddp):
        ddp(inputs(rank, 0))["logits"].sum().backward()
    assert type(module.weights[0]) is nn.Parameter
    assert isinstance(module.weights[1], DTensor)


def test_ignored_parameters_are_not_called_replicated(tmp_path: Path) -> None:
    run_ranks(ignore, WORLD_SIZE, tmp_path / "ranks")


class Attention(nn.Module):
    """Attends with torch's fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.layer(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def attend(rank: int) -> None:
    ddp = DistributedDataParallel(Attention())
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(rank))
    with replicated_parameters(ddp):
        ddp(x).square().sum().backward()
    module: Any = ddp.module
    weight = module.layer.weight
    replicated, weight.grad = weight.grad, None
    assert torch.backends.cuda.flash_sdp_enabled()
    ddp(x).square().sum().backward()
    # Another kernel rounds otherwise: float32, sums of some ten products.
    torch.testing.assert_close(replicated, weight.grad, rtol=1e-4, atol=1e-5)


def test_attention_is_computed_by_operators_that_dtensor_knows(tmp_path: Path) -> None:
    run_ranks(attend, WORLD_SIZE, tmp_path / "ranks")
