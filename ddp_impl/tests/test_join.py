"""What a join context says and leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one


class Halves(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = self.used(rows)
        return used


def test_a_backward_that_is_not_complete_is_named_when_the_context_is_left() -> None:
    with group_of_one():
        model = DistributedDataParallel(Halves())
        with pytest.raises(RuntimeError, match=r"left_out\.weight"), model.join():
            model(torch.ones(1, 2)).sum().backward()


def test_an_exception_in_a_context_comes_out_and_ends_it() -> None:
    with group_of_one():
        model = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ZeroDivisionError), model.join():
            raise ZeroDivisionError
        assert not model._join_config.enable
