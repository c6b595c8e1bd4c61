"""Ranks for tests: fresh processes that meet through a file, or this process alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

_DEADLINE_S = 240.0

#: How long ranks may take to end once one of them has failed: long enough to say why they failed, too.
_LAST_WORDS_S = 10.0


@contextlib.contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    """Make this process the one rank of a default group while the block runs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def meet(rank: int, world_size: int, store: Store) -> None:
    """Make this process `rank` of a default gloo group; every rank must call it, and none returns before all have met.

    torch lets each rank go on as soon as it has connected to the others itself. One that leaves the group at once then
    closes its connections while a slower one is still connecting, which ends there with "Gloo connectFullMesh failed
    ... Connection closed by peer". torch's own switch for such programs is `TORCH_DIST_INIT_BARRIER`.
    """
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def run_ranks(function: Callable[..., Any], world_size: int, directory: Path, *arguments: Any) -> list[Any]:
    """Return what `function(rank, *arguments)` returns on each rank of a gloo group.

    The default group exists while it runs. `directory` is private to the call. Raises `RuntimeError` with what every
    rank that failed has raised, and `TimeoutError` when the ranks take too long; no process is left behind.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Not forks of this process: where it has compiled before, its threads are missing in a fork, and compiling crashes.
    multiprocessing.set_forkserver_preload(["torch.distributed", "ddp_impl"])
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_rank_main, args=(rank, function, world_size, directory, arguments), daemon=True)
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        _await(processes)
        exit_codes = [process.exitcode for process in processes]  # None: still running
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failures := _failures(exit_codes, directory):
        raise RuntimeError("\n".join(failures))
    if None in exit_codes:
        raise TimeoutError(f"ranks did not finish {function.__name__} within {_DEADLINE_S} s")
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _await(processes: Sequence[BaseProcess]) -> None:
    """Wait until every process has ended, or until a failure has had time to reach the others."""
    end = time.monotonic() + _DEADLINE_S
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + _LAST_WORDS_S)
        if not multiprocessing.connection.wait([process.sentinel for process in running], end - time.monotonic()):
            return


def _failures(exit_codes: Sequence[int | None], directory: Path) -> list[str]:
    """Return what each rank that raised or died says of it; of those that raised, the first to do so comes first."""
    files = sorted(directory.glob("rank*.raised"), key=lambda path: path.stat().st_mtime_ns)
    raised = {path.stem: path.read_text() for path in files}
    died = [
        f"rank{rank} ended with exit code {code} and left no word"
        for rank, code in enumerate(exit_codes)
        if code and f"rank{rank}" not in raised
    ]
    return [*died, *(f"{rank} raised:\n{text}" for rank, text in raised.items())]


def _rank_main(
    rank: int, function: Callable[..., Any], world_size: int, directory: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        meet(rank, world_size, dist.FileStore(str(directory / "store"), world_size))  # type: ignore[attr-defined]
        torch.save(function(rank, *arguments), directory / f"rank{rank}.pt")
    except BaseException:
        # Written before this rank leaves the group: what the others raise then is a consequence.
        (directory / f"rank{rank}.raised").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
