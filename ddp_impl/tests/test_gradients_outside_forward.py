"""Parameters that the loss reaches past the wrapper's outputs: their gradients are averaged like all others.

UNUSED-15 asks for the ways in which a loss may do so; here is when the gradient arrives.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.base.errors import ReductionError
from ddp_impl.tests.ranks import group_of_one


class Parts(nn.Module):
    """Has a layer, `pooler`, that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.pooler = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


@pytest.mark.parametrize("is_late", [False, True])
def test_a_parameter_out_of_reach_of_the_outputs_is_awaited_if_the_loss_reaches_it(is_late: bool) -> None:
    """The penalty on `pooler` comes before the last gradient of the one bucket, or after it."""
    with group_of_one():
        parts, x = Parts(), torch.randn(6, 8)
        ddp = DistributedDataParallel(parts, find_unused_parameters=True)
        for _ in range(2):  # in these `pooler` is unused
            ddp(x).square().sum().backward()
        parts.zero_grad()
        # Autograd comes to what was made first last.
        penalised = [parts.pooler.weight] if is_late else [parts.body.weight, parts.pooler.weight]
        before = torch.stack([weight.square().sum() for weight in penalised]).sum()
        (ddp(x).square().sum() + before).backward()
        ddp._check_reducer_finalized()
        assert parts.pooler.weight.grad is not None
        assert torch.equal(parts.pooler.weight.grad, 2 * parts.pooler.weight)


def test_with_a_static_graph_a_loss_past_all_outputs_is_called_so() -> None:
    class KeepsItsLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            features = self.head(x)
            self.loss = features.square().mean()
            return features * 2

    with group_of_one():
        ddp = DistributedDataParallel(module := KeepsItsLoss(), static_graph=True)
        ddp(torch.ones(2, 4))
        module.loss.backward()
        with pytest.raises(ReductionError, match="reached no tensor that forward returned"):
            ddp(torch.ones(2, 4))
