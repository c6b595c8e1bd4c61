"""Scenarios of chapter failures: mistaken calls are refused, and the group works afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import InChapter
from conformance.scenario import Scenario

_chapter = InChapter("failures")

_CASES = (
    ("ERR-02", "wrong-sizes", ()),
    ("ERR-02", "wrong-single-sizes", ("all_gather_into_tensor",)),
    ("ERR-02", "wrong-scatters", ("reduce_scatter",)),
)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3):
        for requirement, case, needs in _CASES:
            yield _chapter.scenario(
                requirement, case, "refused_calls", world_size, also=("ERR-03",), needs=needs, arguments={"case": case}
            )
        yield _chapter.scenario("ERR-09", "destroyed", "destroyed_groups", world_size)
        for operation in ("all_reduce", "broadcast", "all_gather"):
            yield _chapter.scenario(
                "ERR-05", operation.replace("_", "-"), "ranks_that_disagree", world_size,
                arguments={"operation": operation, "about": "size"}, needs=("timeouts",),
            )  # fmt: skip
