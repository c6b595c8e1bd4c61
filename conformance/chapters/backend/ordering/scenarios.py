"""Scenarios of chapter ordering: many operations at once, and what waits for what."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import OF_TWO, BackendGrid, each_operation, every_cell
from conformance.chapters.backend.ordering.concurrency import OWN_ORDER, RING, THREADS
from conformance.chapters.backend.ordering.sequence_numbers import AFTER_MESSAGES, OF_DEFAULT, OF_NEW
from conformance.chapters.variants import Variant, dashed
from conformance.programs.operations.description import CALLED, OPERATIONS
from conformance.scenario import Scenario

_grid = BackendGrid("ordering")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3, 4):
        also = ("ORD-02", "ORD-07", "ORD-09")
        yield from _grid("ORD-01", "in-flight", "many_in_flight", world_size, also=also, needs=("send_recv",))
        yield from _grid(
            "ORD-03", "groups", "several_groups", world_size, also=("ORD-05",), needs=("unordered_groups",),
            arguments={"trials": [OWN_ORDER, THREADS]},
        )  # fmt: skip
        yield from _grid("ORD-04", "ring", "several_groups", world_size, arguments={"trials": [RING]})
        yield from _grid(
            "ORD-10", "sequence-numbers", "sequence_numbers", world_size, arguments={"trials": [OF_DEFAULT, OF_NEW]}
        )
        yield from _grid("ORD-08", "barriers", "barriers", world_size)
    yield from _grid(
        "ORD-10", "after-messages", "sequence_numbers", 3, arguments={"trials": [AFTER_MESSAGES]}, needs=("send_recv",)
    )
    pairs = every_cell(OPERATIONS, ["float32"], beside=tuple(OPERATIONS), neighbour="alike-in-flight", lifetime="wait")
    yield from _grid.cells("ORD-02", pairs, 3, slug="beside", together=True)
    for operation, needs in (("all_reduce", ()), ("broadcast", ()), ("send_recv", ("send_recv",))):
        called = Variant(dashed(operation), arguments={"operation": operation}, needs=needs)
        yield from _grid("ORD-11", "65636", "many_numbers", 2, called, deadline_s=60.0)
    for called in each_operation(CALLED):
        yield from _grid("ORD-06", "", "calls_beside_a_wait", (2, 3), called)
    yield from _grid.disagreements("ORD-12", "operation", OF_TWO, (2, 3))
