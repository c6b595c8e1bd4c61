"""Two wrappers whose backwards run in different orders: ranks would average gradients of different modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_impl import DistributedDataParallel
from ddp_impl.base.errors import ReductionError
from ddp_impl.tests.ranks import run_ranks


def _train_later(rank: int) -> str:
    wrappers = [DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    try:
        for step in range(4):
            for wrapper in wrappers if rank == 0 or step < 3 else reversed(wrappers):
                wrapper(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:  # rank 0 hears that rank 1 is gone
        return str(error)
    return ""


def _train(rank: int, hook: Any) -> str:
    wrappers = [DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    for wrapper in wrappers if hook else ():
        wrapper.register_comm_hook(None, hook)
    try:
        for wrapper in wrappers if rank == 0 else reversed(wrappers):
            wrapper(torch.ones(1, 2)).sum().backward()
        for wrapper in wrappers:
            wrapper(torch.ones(1, 2))
    except ReductionError as error:
        return str(error)
    return ""


def test_ranks_that_run_backwards_in_different_orders_raise(tmp_path: Path) -> None:
    for rank, error in enumerate(run_ranks(_train, 2, tmp_path, None)):
        assert f"[rank {rank}] the ranks' collectives came in different orders" in error
        assert "in one order on every rank" in error


def test_a_rank_that_changes_its_order_later_says_so(tmp_path: Path) -> None:
    _, error = run_ranks(_train_later, 2, tmp_path)
    assert "[rank 1] the ranks' collectives came in different orders" in error
    assert "buckets of other wrappers since its last backward" in error


def _own_hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    """Average as torch's hook does, of which is known that all ranks have called it when it is done."""
    return allreduce_hook(state, bucket)


def test_a_rank_with_a_comm_hook_that_runs_another_backward_than_rank_0_says_so(tmp_path: Path) -> None:
    first, second = run_ranks(_train, 2, tmp_path, _own_hook)
    assert not first, "rank 0 is what the others are compared with"
    assert "this rank has run the backward of the group's wrapper 0" in second
    assert "where rank 0 ran that of wrapper 1" in second
    assert "in the same order on every rank" in second
