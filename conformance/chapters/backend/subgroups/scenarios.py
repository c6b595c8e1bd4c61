"""Scenarios of chapter subgroups: every operation in every kind of group, and what groups know."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, every_cell
from conformance.chapters.backend.made_to_order import at_world_size
from conformance.chapters.variants import each
from conformance.programs.operations.data import FLOATS, INTEGERS
from conformance.programs.operations.description import OPERATIONS
from conformance.scenario import Scenario

_grid = BackendGrid("subgroups")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _grid("GRP-12", "seconds-late", "late_member", (2, 3), deadline_s=20.0)
    for world_size in (3, 4):
        for requirement, slug, program, also in (
            ("GRP-01", "who-is-where", "who_is_where", ("GRP-04", "GRP-14")),
            ("GRP-02", "roots", "roots_of_subgroups", ()),
            ("GRP-06", "apart", "groups_apart", ("GRP-08", "GRP-10", "GRP-12", "GRP-15")),
        ):
            yield from _grid(requirement, slug, program, world_size, also=also)
        yield from _grid("GRP-16", "dozens", "many_groups", world_size)
        yield from _grid("GRP-09", "", "refused_calls", world_size, each("case", ["unknown-ranks"]))
        yield from _grid("GRP-07", "local", "local_synchronisation", world_size, needs=("local_synchronization",))
    operations = [operation for operation, what in OPERATIONS.items() if what.rooted]
    axes = {"root": (0, 1, 2), "group": ("without-0", "permuted"), "path": ("public", "group")}
    rooted = every_cell(operations, ["int64"], **axes)
    yield from _grid.cells("GRP-03", rooted, 4)
    alone = every_cell(
        OPERATIONS, (*FLOATS, *INTEGERS, "bool"), op=("SUM", "MAX"), numel=(1, 7, 130), group="alone",
        lifetime=("sync", "wait"),
    )  # fmt: skip
    yield from _grid.cells("GRP-05", alone, 1, 3, together=True)
    sizes = every_cell(OPERATIONS, ["int32"], root=(0, 1, 4))
    yield from _grid.cells("GRP-13", sizes, 1, 2, 3, 5, 8)
    for world_size in (5, 8):
        yield from at_world_size(world_size)
