"""The messages between controller and host."""

from __future__ import annotations

from msgspec import Struct

from conformance.upstream.outcome import TestName, TestRun


class ListTests(Struct, frozen=True, tag=True):
    """Controller to host: which tests can run at this world size? The answer is `Tests`."""

    world_size: int


class RunTest(Struct, frozen=True, tag=True):
    """Controller to host: run this. The answer is `Ran`."""

    name: TestName
    world_size: int
    timeout_s: float


class Tests(Struct, frozen=True, tag=True):
    """Host to controller: the tests that can run."""

    names: tuple[TestName, ...]


class Ran(Struct, frozen=True, tag=True):
    """Host to controller: how the test ended."""

    run: TestRun


class Refusal(Struct, frozen=True, tag=True):
    """Host to controller, instead of an answer: why it cannot serve."""

    reason: str


ToHost = ListTests | RunTest
FromHost = Tests | Ran | Refusal
