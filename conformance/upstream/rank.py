"""The programs that run one rank of one of torch's tests, and list the tests."""

import importlib
import os
import tempfile
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth
from conformance.recorder import group as recorder_group
from conformance.subjects.subject import load, named
from conformance.upstream.cpu_placement import place_on_cpu
from conformance.upstream.outcome import TestName
from conformance.upstream.suite import SUITES, Suite, ddp_tests, get_suite
from conformance.upstream.swap import Constructions, swap_in
from conformance.workers.forked import MARKER

#: The tests' own barrier polls files and gives up after ten seconds, which a busy machine may need.
_BARRIER_TIMEOUT_S = 120.0

_TESTS_FOLDER = "torch/testing/_internal/distributed"
_NUM_MESSAGE_LINES = 4


#: The suites whose tests are here. torch's tests read the world size at import, which takes seconds: the process that
#: forks ranks imports this module.
_HERE = tuple(suite for suite in SUITES if suite.load())


@program_without_truth("upstream/list", without_ddp=True)
def list_tests(ctx: RankContext) -> None:
    """Observe which tests can run at the world size for which this process was started."""
    world_size = int(os.environ["WORLD_SIZE"])
    suites = [suite for suite in _HERE if suite.world_size in (0, world_size)]
    ctx.observe("tests", [[suite.name, method] for suite in suites for method in ddp_tests(suite)])


@program_without_truth("upstream/test", without_ddp=True)
def run_test(ctx: RankContext) -> None:
    """Run a test with a DDP in the place of torch's; the process is of no use for anything else afterwards.

    Observes how many DDPs the test has constructed, and in a few lines why it failed, if it did.
    """
    name = TestName(ctx.arguments["suite"], ctx.arguments["method"])
    recorder_group.leave()  # the tests make their own
    directory = _prepare_environment(ctx)
    constructions = Constructions()
    try:
        suite = get_suite(name.suite)
        case: Any = suite.test_case()(name.method)
        case.rank, case.file_name = ctx.rank, str(directory / "rendezvous")
        constructions = swap_in(load(named(ctx.arguments["ddp"])))
        place_on_cpu(ctx.rank)
        _lengthen_barriers(suite)
        common_utils.set_rng_seed()
        if suite.has_group:
            _join_default_group(suite, name, case.file_name, ctx.rank, ctx.world_size)
        getattr(case, name.method)()
    except unittest.SkipTest as skip:
        ctx.unsupported(str(skip))
    except SystemExit as end:
        _end_as_exit(ctx, end.code)
    except BaseException as error:
        ctx.observe("cause", _cause(error))
        raise
    finally:
        ctx.observe("constructed", constructions.count)


def _prepare_environment(ctx: RankContext) -> Path:
    """Set the environment variables that torch's tests read; returns a directory for this run of the test alone."""
    directory = Path(os.environ[MARKER], ctx.arguments["directory"])
    for folder in ("barrier", "test_dir"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "TEMP_DIR": str(directory),
        "TMPDIR": str(directory),
        "INIT_METHOD": f"file://{directory}/rendezvous",
        "RANK": str(ctx.rank),
        "MASTER_ADDR": "localhost",
    }
    tempfile.tempdir = str(directory)  # somebody has looked it up before
    return directory


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


def _end_as_exit(ctx: RankContext, code: object) -> NoReturn:
    """End as a test that left with this exit code: some are those by which torch's tests skip in a rank."""
    for skip in common_distributed.TEST_SKIPS.values():
        if code == skip.exit_code:
            ctx.unsupported(skip.message)
    ctx.observe("cause", f"the test exited with status {code}")
    raise RuntimeError(f"the test exited with status {code}")
