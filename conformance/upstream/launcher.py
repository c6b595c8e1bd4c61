"""Finds torch's own DDP tests and runs them, each on ranks of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import trio

from conformance.errors import ConformanceError
from conformance.observation import Observation
from conformance.scenario import Scenario
from conformance.subjects.subject import NO_DDP, Subject
from conformance.upstream.outcome import RankEnd, TestName, TestOutcome, TestRun
from conformance.waiting import loop
from conformance.workers.controller import Controller
from conformance.workers.finder import find_backend
from conformance.workers.zygote_process import NO_MEMORY_FILL

#: A test gets the smallest of these world sizes at which it can run.
WORLD_SIZES = (2, 3, 4, 6)

_NUM_FRAMES = 3


class TestRanks:
    """Ranks for torch's tests of one DDP; a context manager, at whose end none of them is left.

    torch's tests read the world size when they are imported, so there is a controller for each, from when it is needed.
    """

    __test__ = False  # for pytest, which takes any class of this name for a test

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._controllers: dict[int, Controller] = {}
        self._numbers = itertools.count()

    def tests(self, world_size: int) -> tuple[TestName, ...]:
        """Return the DDP tests that can run at `world_size`; raises `ConformanceError`."""
        (seen,) = loop.run(
            self._observe, world_size, Scenario("upstream/list", ("UPSTREAM",), "upstream/list", world_size=1)
        )
        if seen.fate.kind != "returned":
            raise ConformanceError(f"cannot list torch's tests: their rank {seen.fate}")
        return tuple(TestName(*name) for name in seen.facts["tests"])

    async def run(self, name: TestName, world_size: int, timeout_s: float) -> TestRun:
        """Run one test and return its result, however its ranks end."""
        began = time.monotonic()
        scenario = Scenario(
            f"upstream/{name}",
            ("UPSTREAM",),
            "upstream/test",
            world_size=world_size,
            arguments={
                "suite": name.suite,
                "method": name.method,
                "ddp": self._subject.target,
                "directory": f"test{next(self._numbers)}",
            },
            deadline_s=timeout_s,
            recorded=False,
        )
        seen = await self._observe(world_size, scenario)
        return TestRun(name, world_size, ends_of(seen), time.monotonic() - began)

    def __enter__(self) -> TestRanks:
        return self

    def __exit__(self, *raised: object) -> None:
        for controller in self._controllers.values():
            controller.close()

    async def _observe(self, world_size: int, scenario: Scenario) -> list[Observation]:
        if world_size not in self._controllers:
            self._controllers[world_size] = Controller(
                find_backend("gloo"),
                preload=("conformance.upstream.rank", self._subject.target.partition(":")[0]),
                environment={
                    **NO_MEMORY_FILL,
                    "BACKEND": "gloo",
                    "WORLD_SIZE": str(world_size),
                    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
                    # Else a test may reach a rank that has connected, and has not yet noted its group.
                    "TORCH_DIST_INIT_BARRIER": "1",
                },
            )
        self._controllers[world_size].retire(scenario, NO_DDP)
        return list((await self._controllers[world_size].observe(scenario, NO_DDP, fresh=True)).values())


def find_tests(ranks: TestRanks, world_size: int | None = None) -> dict[TestName, int]:
    """Return all DDP tests of this torch, and the world size for each.

    Without `world_size` each gets the smallest of `WORLD_SIZES` at which it can run; with it, those that cannot run at
    it are left out.

    Raises:
        ConformanceError: torch's tests cannot be imported here.

    """
    found: dict[TestName, int] = {}
    for size in WORLD_SIZES if world_size is None else (world_size,):
        for name in ranks.tests(size):
            found.setdefault(name, size)
    return dict(sorted(found.items()))


def run_tests(
    ranks: TestRanks,
    tests: Mapping[TestName, int],
    *,
    timeout_s: float,
    jobs: int = 1,
    on_end: Callable[[TestRun], None] = lambda run: None,
) -> dict[TestName, TestRun]:
    """Run `tests`, `jobs` at a time, each for at most `timeout_s` seconds; calls `on_end` after every test.

    Raises:
        ConformanceError: the DDP cannot be imported there.

    """
    runs: dict[TestName, TestRun] = {}

    async def run_all() -> None:
        places = trio.Semaphore(jobs)

        async def run(name: TestName, world_size: int) -> None:
            runs[name] = await ranks.run(name, world_size, timeout_s)
            on_end(runs[name])
            places.release()

        async with trio.open_nursery() as nursery:
            for name, world_size in sorted(tests.items(), key=lambda item: item[1]):
                await places.acquire()
                nursery.start_soon(run, name, world_size)

    loop.run(run_all)
    return runs


def ends_of(observations: list[Observation]) -> tuple[RankEnd, ...]:
    """Return how the ranks of a test ended: first those that died, the others in the order in which they ended."""
    in_order = sorted(observations, key=lambda seen: (seen.fate.kind not in ("killed", "exited"), seen.duration_ns))
    return tuple(map(_end_of, in_order))


def _end_of(seen: Observation) -> RankEnd:
    constructed = seen.facts.get("constructed", 0)
    match seen.fate.kind:
        case "returned" if not seen.unsupported:
            return RankEnd(seen.rank, TestOutcome.PASSED, num_constructed=constructed)
        case "returned":
            return RankEnd(seen.rank, TestOutcome.SKIPPED, seen.unsupported, num_constructed=constructed)
        case "raised" if seen.raised and "cause" in seen.facts:
            return RankEnd(seen.rank, TestOutcome.FAILED, seen.facts["cause"], seen.raised.traceback, constructed)
        case "hung":
            where = "\n".join(line.strip() for line in seen.frames[:_NUM_FRAMES])
            return RankEnd(seen.rank, TestOutcome.HUNG, where or f"{seen.fate}, and no stack to show", seen.stack)
        case "abandoned":
            return RankEnd(seen.rank, TestOutcome.STOPPED, "still running after another rank had failed", seen.stack)
        case _:
            return RankEnd(seen.rank, TestOutcome.CRASHED, str(seen.fate), seen.stderr)
