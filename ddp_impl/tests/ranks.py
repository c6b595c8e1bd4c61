"""Ranks for tests: fresh processes that meet through a file, or this process alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

_DEADLINE_S = 240.0


@contextlib.contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    """Make this process the one rank of a default group while the block runs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world_size: int, directory: Path, *arguments: Any) -> list[Any]:
    """Return what `function(rank, *arguments)` returns on each rank of a gloo group; raises what a rank raised.

    The default group exists while it runs. `directory` is private to the call. Raises `TimeoutError` when the ranks
    take too long; none is left behind.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Not forks of this process: where it has compiled before, its threads are missing in a fork, and compiling crashes.
    multiprocessing.set_forkserver_preload(["torch.distributed", "ddp_impl"])
    context = start_processes(
        _rank_main, (function, world_size, directory, arguments), world_size, join=False, start_method="forkserver"
    )
    assert context is not None
    end = time.monotonic() + _DEADLINE_S
    try:
        while not context.join(max(0.0, end - time.monotonic())):
            if time.monotonic() > end:
                raise TimeoutError(f"ranks did not finish {function.__name__} within {_DEADLINE_S} s")
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int, function: Callable[..., Any], world_size: int, directory: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(directory / "store"), world_size
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *arguments), directory / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
