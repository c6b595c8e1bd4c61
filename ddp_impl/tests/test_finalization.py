"""Gradients that the user finalizes: nobody reads one before, whatever reads it; and what the library says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    """Wrap a layer whose backward is not final yet."""
    with group_of_one():
        ddp = DistributedDataParallel(nn.Linear(3, 3), lazy_bucket_allocation=True)
        ddp.require_manual_backward_finalization = True
        ddp(torch.ones(1, 3)).sum().backward()
        yield ddp


USES: dict[str, Callable[[Any, Any], object]] = {
    "fused step": lambda layer, grad: torch.optim.Adam(layer.parameters(), fused=True).step(),
    "clip of values": lambda layer, grad: nn.utils.clip_grad_value_(layer.parameters(), 1.0),
    "zeros": lambda layer, grad: layer.zero_grad(set_to_none=False),
    "in place": lambda layer, grad: grad.add_(1),
    "in a list": lambda layer, grad: torch.cat([grad.view(-1)]),
    "as text": lambda layer, grad: repr(grad),
    "as an array": lambda layer, grad: grad.numpy(),
    "its data": lambda layer, grad: grad.data,
    "an element": lambda layer, grad: float(grad[0, 0]),
    "another backward": lambda layer, grad: layer(torch.ones(1, 3)).sum().backward(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_gradient_that_is_not_final_is_an_error(ddp: DistributedDataParallel, use: str) -> None:
    layer: Any = ddp.module
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"finalize_backward|single memory location"):
        USES[use](layer, layer.weight.grad)
    assert torch.equal(layer.weight, before)
    ddp.finalize_backward()
    assert layer.weight.grad.sum() == 9
    assert all(not bucket.views and not bucket.flat.numel() for bucket in ddp.reducer.buckets)


def test_a_copy_finalizes_by_hand_too_and_owes_nothing(ddp: DistributedDataParallel) -> None:
    other = copy.deepcopy(ddp)
    assert other.require_manual_backward_finalization is True
    assert other.lazy_bucket_allocation is True
    with pytest.raises(RuntimeError, match="has nothing to finalize"):
        other.finalize_backward()
    other.require_manual_backward_finalization = False
    assert not other.should_finalize_after_backward
