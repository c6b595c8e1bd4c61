"""Scenarios of chapter failures: mistaken calls are refused, and the group works afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.chapters.variants import Variant, arguments, each
from conformance.scenario import Scenario

_grid = BackendGrid("failures")

_CASES = (
    ("ERR-02", "wrong-sizes", ()),
    ("ERR-02", "wrong-single-sizes", ("all_gather_into_tensor",)),
    ("ERR-02", "wrong-scatters", ("reduce_scatter",)),
    ("ERR-02", "wrong-all-to-alls", ("all_to_all",)),
)
#: A call that is wrong by its arguments is refused by the rank that makes it, whatever others do.
_WHO = (Variant(), arguments("alone", alone=True))


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3):
        for requirement, case, needs in _CASES:
            also = {"also": ("ERR-03",), "needs": needs}
            yield from _grid(requirement, "", "refused_calls", world_size, each("case", [case]), _WHO, **also)
        lists = each("case", ["wrong-lists-of-roots"])
        yield from _grid(
            "ERR-02", "", "refused_calls", world_size, lists, _WHO[1:], also=("ERR-03",), needs=("gather_scatter",)
        )
        yield from _grid("ERR-09", "destroyed", "destroyed_groups", world_size)
        yield from _grid.disagreements("ERR-05", "size", world_size)
