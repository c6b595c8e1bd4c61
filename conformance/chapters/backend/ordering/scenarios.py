"""Scenarios of chapter ordering: many operations at once, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.scenario import Scenario

_chapter = InChapter("ordering")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3, 4):
        yield _chapter.scenario(
            "ORD-01", "in-flight", "many_in_flight", world_size, also=("ORD-02", "ORD-07", "ORD-09"),
            needs=("send_recv",),
        )  # fmt: skip
        yield _chapter.scenario("ORD-03", "groups", "several_groups", world_size, also=("ORD-04", "ORD-05"))
        yield _chapter.scenario("ORD-08", "barriers", "barriers", world_size, also=("ORD-11",))
    for world_size in (2, 3):
        for operation in ("all_reduce", "broadcast", "all_gather"):
            yield _chapter.scenario(
                "ORD-12", operation.replace("_", "-"), "ranks_that_disagree", world_size,
                arguments={"operation": operation, "about": "operation"}, needs=("timeouts",),
            )  # fmt: skip
