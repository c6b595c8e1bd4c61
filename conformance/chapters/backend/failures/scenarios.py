"""Scenarios of chapter failures: mistaken calls are refused, and the group works afterwards."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import OF_TWO, BackendGrid
from conformance.chapters.variants import Variant, arguments, each
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_grid = BackendGrid("failures")

#: A call that is wrong by its arguments is refused by the rank that makes it, whatever others do.
_ALONE = arguments("alone", alone=True)
_ALL_OR_ONE = (Variant(), _ALONE)
_CASES = (
    ("wrong-sizes", (), _ALL_OR_ONE),
    ("wrong-single-sizes", ("all_gather_into_tensor",), _ALL_OR_ONE),
    ("wrong-scatters", ("reduce_scatter",), _ALL_OR_ONE),
    ("wrong-all-to-alls", ("all_to_all",), _ALL_OR_ONE),
    ("wrong-lists-of-roots", ("gather_scatter",), (_ALONE,)),
)
_UNEVEN = {"all_to_all_uneven": OPERATIONS["all_to_all_uneven"]}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3):
        for case, needs, who in _CASES:
            also = {"also": ("ERR-03",), "needs": needs}
            yield from _grid("ERR-02", "", "refused_calls", world_size, each("case", [case]), who, **also)
        yield from _grid("ERR-09", "destroyed", "destroyed_groups", world_size)
    yield from _grid.disagreements("ERR-05", "size", OF_TWO, 2)
    yield from _grid.disagreements("ERR-05", "size", OPERATIONS, 3)
    yield from _grid.disagreements("ERR-05", "split", _UNEVEN, 3)
