"""Scenarios of chapter timeouts: waits for ranks that never come end, and those for slow ones do not."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.chapters.backend.timeouts.waiting import CALLS
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_chapter = InChapter("timeouts")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3):
        for operation in CALLS:
            of_operation = OPERATIONS[operation].needs if operation in OPERATIONS else ""
            needs = tuple(need for need in ("timeouts", of_operation) if need)
            slug = operation.replace("_", "-")
            for requirement, whose, suffix in (
                ("TIME-01" if operation == "all_reduce" else "TIME-05", "the group's timeout", "of-group"),
                ("TIME-02", "the operation's timeout", "own"),
                ("TIME-03", "wait's timeout", "of-wait"),
            ):
                if operation == "recv" and suffix == "own":
                    continue  # its method takes none
                also = ("WORK-05", "WORK-07") if suffix == "of-group" else ()
                yield _chapter.scenario(
                    requirement, f"{slug}-{suffix}", "nobody_comes", world_size, also=also, needs=needs,
                    arguments={"operation": operation, "whose": whose}, deadline_s=20.0,
                )  # fmt: skip
        for operation in ("all_reduce", "barrier"):
            yield _chapter.scenario(
                "TIME-06", operation.replace("_", "-"), "somebody_is_slow", world_size,
                arguments={"operation": operation},
            )  # fmt: skip
