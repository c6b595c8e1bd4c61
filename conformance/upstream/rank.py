"""Runs one rank of one of torch's tests, in a process forked for it."""

from __future__ import annotations

import faulthandler
import importlib
import os
import tempfile
import traceback
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

from conformance.upstream.cpu_placement import place_on_cpu
from conformance.upstream.outcome import RankEnd, TestName, TestOutcome
from conformance.upstream.suite import Suite, get_suite
from conformance.upstream.swap import Constructions, Factory, swap_in

#: The tests' own barrier polls files and gives up after ten seconds, which a busy machine may need.
_BARRIER_TIMEOUT_S = 120.0

_TESTS_FOLDER = "torch/testing/_internal/distributed"
_NUM_MESSAGE_LINES = 4


def run_rank(name: TestName, rank: int, world_size: int, directory: Path, subject: Factory) -> RankEnd:
    """Run the test `name` as `rank` of `world_size`, with `subject` for torch's DDP; all ranks must call it.

    The process is of no use for anything else afterwards. `directory` is private to this run of the test, and shared by
    its ranks; the rendezvous is a file in it. Raises nothing that a test can raise.
    """
    constructions = Constructions()
    try:
        suite = get_suite(name.suite)
        case: Any = suite.test_case()(name.method)
        case.rank, case.file_name = rank, str(directory / "rendezvous")
        constructions = swap_in(subject)
        place_on_cpu(rank)
        _lengthen_barriers(suite)
        common_utils.set_rng_seed()
        if suite.has_group:
            _join_default_group(suite, name, case.file_name, rank, world_size)
        getattr(case, name.method)()
    except unittest.SkipTest as skip:
        return RankEnd(rank, TestOutcome.SKIPPED, str(skip), num_constructed=constructions.count)
    except SystemExit as end:
        return _end_of_exit(rank, end.code, constructions.count)
    except BaseException as error:
        return RankEnd(rank, TestOutcome.FAILED, _cause(error), traceback.format_exc(), constructions.count)
    return RankEnd(rank, TestOutcome.PASSED, num_constructed=constructions.count)


def prepare_environment(rank: int, world_size: int, directory: Path, timeout_s: float) -> Callable[[], None]:
    """Set the environment variables that torch's tests read, and make the process end itself at its deadline.

    The stacks of all threads are then in `stack<rank>`, which tells this end from other exits. Returns what calls the
    deadline off.
    """
    (directory / "barrier").mkdir(exist_ok=True)
    (directory / "test_dir").mkdir(exist_ok=True)
    os.environ |= {
        "TEMP_DIR": str(directory),
        "TMPDIR": str(directory),
        "INIT_METHOD": f"file://{directory}/rendezvous",
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "MASTER_ADDR": "localhost",
    }
    tempfile.tempdir = str(directory)  # the host has looked it up before
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=(directory / f"stack{rank}").open("w"))
    return faulthandler.cancel_dump_traceback_later


def _lengthen_barriers(suite: Suite) -> None:
    barrier = getattr(importlib.import_module(suite.module), "Barrier", None)
    if barrier is None:
        return
    original = barrier.sync

    def sync(wait_for: int | None = None, timeout: float = 0.0) -> None:
        original(wait_for, timeout=max(timeout, _BARRIER_TIMEOUT_S))

    barrier.sync = sync


def _join_default_group(suite: Suite, name: TestName, file_name: str, rank: int, world_size: int) -> None:
    module = importlib.import_module(suite.module)
    timeout_s = module.CUSTOM_PG_TIMEOUT.get(name.method, module.default_pg_timeout)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file_name}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _cause(error: BaseException) -> str:
    """Return the line of torch's tests that failed, and the beginning of its error message."""
    frames = traceback.extract_tb(error.__traceback__)
    here = next((frame for frame in reversed(frames) if _TESTS_FOLDER in frame.filename), frames[-1])
    return "\n".join([f"{Path(here.filename).name}:{here.lineno} {here.line}", *_message(error)])


def _message(error: BaseException) -> list[str]:
    lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return lines[:_NUM_MESSAGE_LINES]


def _end_of_exit(rank: int, code: object, num_constructed: int) -> RankEnd:
    """Return SKIPPED for an exit code by which torch's tests skip in a rank, and FAILED for any other."""
    for skip in common_distributed.TEST_SKIPS.values():
        if code == skip.exit_code:
            return RankEnd(rank, TestOutcome.SKIPPED, skip.message, num_constructed=num_constructed)
    return RankEnd(rank, TestOutcome.FAILED, f"the test exited with status {code}", num_constructed=num_constructed)
