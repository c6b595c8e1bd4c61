"""Two wrappers whose backwards run in different orders: ranks would average gradients of different modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import run_ranks


def _train(rank: int, hook: Any) -> str:
    wrappers = [DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    for wrapper in wrappers if hook else ():
        wrapper.register_comm_hook(None, hook)
    try:
        for wrapper in wrappers if rank == 0 else reversed(wrappers):
            wrapper(torch.ones(1, 2)).sum().backward()
        for wrapper in wrappers:
            wrapper(torch.ones(1, 2))
    except RuntimeError as error:  # of rank 0 perhaps that rank 1 is gone
        return str(error)
    return ""


def _own_hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    """Average as torch's hook does, of which is known that all ranks have called it when it is done."""
    return allreduce_hook(state, bucket)


@pytest.mark.parametrize("hook", [None, _own_hook])
def test_a_rank_that_runs_another_backward_than_rank_0_raises(hook: Any, tmp_path: Path) -> None:
    _, second = run_ranks(_train, 2, tmp_path, hook)
    assert "this rank has run the backward of the group's wrapper 0" in second
    assert "where rank 0 ran that of wrapper 1" in second
    assert "in the same order on every rank" in second
