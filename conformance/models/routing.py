"""Models that do not use all their parameters in every forward, as real models do."""

import torch
from torch import Tensor, nn

from conformance.models.batches import Batch
from conformance.models.catalogue import ALL_REAL, ModelFixture
from conformance.models.dense import regression_loss, squared_error

NUM_EXPERTS = 10


class MixtureOfExperts(nn.Module):
    """A router that mixes two of ten experts; the other eight get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 8)
        self.router = nn.Linear(8, NUM_EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(NUM_EXPERTS))

    def forward(self, inputs: Tensor, active: tuple[int, int]) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        weights = torch.softmax(self.router(hidden)[:, list(active)], dim=1)
        outputs = torch.stack([self.experts[index](hidden) for index in active], dim=2)
        return (outputs * weights.unsqueeze(1)).sum(2)


class RankBranch(nn.Module):
    """A shared trunk and two branches, of which a forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 8)
        self.branches = nn.ModuleList((nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))))

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        return self.branches[branch](torch.tanh(self.trunk(inputs)))


class TwoHeads(nn.Module):
    """Two outputs; whether the second is in the loss is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 8)
        self.head = nn.Linear(8, 4)
        self.auxiliary = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(inputs))
        return self.head(hidden), self.auxiliary(hidden)


class Unused(nn.Module):
    """A network with a submodule that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.spare = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.last = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


def active_experts(rank: int, step: int, micro: int) -> tuple[int, int]:
    """Return the experts in use: no two of up to four ranks share one, and two or more experts rest on all ranks."""
    first = (2 * rank + 3 * step + 5 * micro) % NUM_EXPERTS
    return first, (first + 1) % NUM_EXPERTS


def _moe_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch.normal(8, 12), active_experts(batch.rank, batch.step, batch.micro))
    return squared_error(output, batch.normal(8, 4))


def _branch_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch.normal(8, 12), batch.rank % 2)
    return squared_error(output, batch.normal(8, 4))


def _first_head_loss(model: nn.Module, batch: Batch) -> Tensor:
    output, _ = model(batch.normal(8, 12))
    return squared_error(output, batch.normal(8, 4))


FIXTURES = (
    ModelFixture("moe", MixtureOfExperts, _moe_loss, has_unused=True),
    ModelFixture("rank_branch", RankBranch, _branch_loss, dtypes=ALL_REAL, has_unused=True),
    ModelFixture("two_heads", TwoHeads, _first_head_loss, dtypes=ALL_REAL, has_unused=True),
    ModelFixture("unused", Unused, regression_loss, dtypes=ALL_REAL, has_unused=True),
)
