"""Scenarios of chapter timeouts: waits for ranks that never come end, and those for slow ones do not."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.chapters.backend.timeouts.waiting import CALLS
from conformance.chapters.variants import Variant, arguments, dashed, each
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_grid = BackendGrid("timeouts")
#: What is called here and is no operation by itself.
_NEEDS = {"recv": "send_recv"}
#: Too long for what ends in time: the timeout, a busy machine, and a second wait.
_DEADLINE_S = 12.0
_SLOW = ("all_reduce", "barrier")
#: A busy machine may keep the slow rank for seconds longer.
_IDLE = {"timeout_s": 4.0, "idle_s": 4.2, "late_s": 1.0}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3):
        for operation in CALLS:
            of_operation = OPERATIONS[operation].needs if operation in OPERATIONS else _NEEDS.get(operation, "")
            needs = tuple(need for need in ("timeouts", of_operation) if need)
            slug = dashed(operation)
            for requirement, whose, suffix in (
                ("TIME-01" if operation == "all_reduce" else "TIME-05", "the group's timeout", "of-group"),
                ("TIME-02", "the operation's timeout", "own"),
                ("TIME-03", "wait's timeout", "of-wait"),
            ):
                if operation == "recv" and suffix == "own":
                    continue  # its method takes none
                also = ("WORK-05", "WORK-07", "WORK-19") if suffix == "of-group" else ()
                called = Variant(f"{slug}-{suffix}", arguments={"operation": operation, "whose": whose}, needs=needs)
                yield from _grid(requirement, "", "nobody_comes", world_size, called, also=also, deadline_s=_DEADLINE_S)
        yield from _grid("TIME-06", "", "somebody_is_slow", world_size, each("operation", _SLOW))
    idle = arguments("idle", **_IDLE)
    yield from _grid("TIME-06", "", "somebody_is_slow", 2, each("operation", _SLOW), idle, deadline_s=_DEADLINE_S)
