"""The messages between controller and host, as pickles over a pipe."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.upstream.outcome import TestName


@dataclass(frozen=True, slots=True)
class ListTests:
    """Controller to host: which tests can run at this world size? The answer is a tuple of `TestName`."""

    world_size: int


@dataclass(frozen=True, slots=True)
class RunTest:
    """Controller to host: run this. The answer is a `TestRun`."""

    name: TestName
    world_size: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Host to controller, instead of an answer: why it cannot serve."""

    reason: str
