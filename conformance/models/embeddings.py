"""Models with embedding tables, with dense and with sparse gradients."""

from functools import partial

import torch
from torch import Tensor, nn

from conformance.models.batches import Batch
from conformance.models.catalogue import ModelFixture
from conformance.models.dense import squared_error

ROWS = 20


class Recommender(nn.Module):
    """Two embedding tables and a linear layer: users and items (each size, int64) to size x 4."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, 6, sparse=sparse)
        self.items = nn.Embedding(ROWS, 10, sparse=sparse)
        self.score = nn.Linear(16, 4)

    def forward(self, users: Tensor, items: Tensor | None) -> Tensor:
        user = self.users(users)
        item = user.new_ones(len(users), 10) if items is None else self.items(items)
        return self.score(torch.cat((user, item), dim=1))


class Bags(nn.Module):
    """Two tables that add up or average rows, with sparse gradients: the same inputs and output as of `Recommender`."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(ROWS, 6, mode="sum", sparse=True)
        self.items = nn.EmbeddingBag(ROWS, 10, mode="mean", sparse=True)
        self.score = nn.Linear(16, 4)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        bags = torch.stack((users, items), dim=1)
        return self.score(torch.cat((self.users(bags), self.items(bags)), dim=1))


def _both_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Use both tables; indices repeat within a batch and differ between ranks."""
    return squared_error(model(batch.integers(ROWS, 12), batch.integers(ROWS, 12)), batch.normal(12, 4))


def _users_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Leave the table of items unused on every rank."""
    return squared_error(model(batch.integers(ROWS, 12), None), batch.normal(12, 4))


def _by_turns_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Use the table of items on every second rank, on the others in the next step."""
    items = batch.integers(ROWS, 12) if (batch.rank + batch.step) % 2 else None
    return squared_error(model(batch.integers(ROWS, 12), items), batch.normal(12, 4))


_SPARSE = partial(Recommender, sparse=True)
FIXTURES = (
    ModelFixture("embedding", partial(Recommender, sparse=False), _both_loss),
    ModelFixture("sparse_embedding", _SPARSE, _both_loss, sparse=True),
    ModelFixture("sparse_by_turns", _SPARSE, _by_turns_loss, sparse=True, has_unused=True),
    ModelFixture("sparse_bags", Bags, _both_loss, sparse=True),
    ModelFixture("sparse_embedding_unused", _SPARSE, _users_loss, sparse=True, has_unused=True),
)
