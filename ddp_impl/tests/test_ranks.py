"""The ranks of these tests meet whole, and say why they fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ddp_impl.tests.ranks import meet, run_ranks

MEETINGS = 16
#: How long rank 0 hesitates before it connects; rank 1 leaves in that time, if it may.
HESITATES_S = 0.15


class Hesitant(Store):
    """Hands everything to `inner`, but reads only once the marker `left` exists or some time is over."""

    def __init__(self, inner: Store, left: Path) -> None:
        super().__init__()
        self.inner = inner
        self.left = left

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def get(self, key: str) -> bytes:
        self._hesitate()
        return self.inner.get(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._hesitate()
        self.inner.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def _hesitate(self) -> None:
        end = time.monotonic() + HESITATES_S
        while not self.left.exists() and time.monotonic() < end:
            time.sleep(0.002)


def _leave_at_once(rank: int, directory: Path) -> None:
    for meeting in range(MEETINGS):
        left = directory / f"left{meeting}"
        store: Store = dist.FileStore(str(directory / f"meeting{meeting}"), 2)  # type: ignore[attr-defined]
        dist.destroy_process_group()
        meet(rank, 2, Hesitant(store, left) if rank == 0 else store)
        if rank == 1:
            dist.destroy_process_group()
            left.touch()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


@pytest.mark.nightly
def test_a_rank_that_leaves_at_once_takes_nobody_with_it(tmp_path: Path) -> None:
    """Without the barrier of `meet` about one meeting in four is lost: gloo lets the faster side connect alone."""
    run_ranks(_leave_at_once, 2, tmp_path, tmp_path)


def _fail(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("rank 1 divides")
    dist.barrier()


def test_every_rank_that_failed_says_why_and_the_first_to_fail_comes_first(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank1 raised:.*ZeroDivisionError: rank 1 divides.*rank0 raised:"):
        run_ranks(_fail, 2, tmp_path)
    assert not multiprocessing.active_children()


def _die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank1 ended with exit code -9"):
        run_ranks(_die, 2, tmp_path)
