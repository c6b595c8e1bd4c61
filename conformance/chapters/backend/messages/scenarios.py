"""Scenarios of chapter messages: send and recv, isend and irecv, and batches of them."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.chapters.variants import Variant, arguments, each
from conformance.programs.operations.cell import DATA, Cell
from conformance.scenario import Scenario

_grid = BackendGrid("messages")

#: Requirement, slug, program, what else it tests, and what it needs besides messages.
_PROGRAMS = (
    ("P2P-01", "all-pairs", "all_pairs", (), ()),
    ("P2P-02", "order", "order_of_messages", ("P2P-10",), ()),
    ("P2P-03", "tags", "tagged_messages", (), ("tags",)),
    ("P2P-04", "unknown-senders", "unknown_senders", (), ("any_source",)),
    ("P2P-04", "unknown-senders-of-tags", "unknown_senders_of_tags", (), ("any_source", "tags")),
    ("P2P-16", "receipts-from-anybody", "receipts_from_anybody", ("P2P-04",), ("any_source",)),
    ("P2P-05", "to-oneself", "messages_to_oneself", (), ("timeouts",)),
    ("P2P-06", "who-waits", "who_waits_for_whom", ("P2P-07",), ()),
    ("P2P-08", "batches", "batches", ("P2P-09",), ()),
    ("P2P-12", "received", "received_when_sent", (), ()),
    ("P2P-11", "many", "many_messages", (), ()),
    ("P2P-15", "beside", "messages_beside", (), ("unordered_groups",)),
    ("P2P-14", "written-over", "messages_written_over", (), ()),
)
#: These try several sizes by themselves.
_OF_SIZES = ("all_pairs", "received_when_sent", "many_messages", "messages_written_over")
#: More than backends send at once, without asking the receiver first.
_LONG = arguments("long", numel=40_000)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (2, 3, 4):
        for requirement, slug, program, also, needs in _PROGRAMS:
            sizes = (Variant(),) if program in _OF_SIZES else (Variant(), _LONG)
            given = {"also": also, "needs": ("send_recv", *needs)}
            yield from _grid(requirement, slug, program, world_size, sizes, **given)
        wrong = each("case", ["wrong-batches"])
        yield from _grid("P2P-13", "", "refused_calls", world_size, wrong, needs=("send_recv",))
    cells = [
        Cell("send_recv", dtype, numel=numel, path=path, data=data, reads=layout, writes=layout)
        for dtype in ("float32", "float64", "int64", "uint8")
        for numel in (1, 33, 5000)
        for path in ("public", "group", "backend")
        for data in DATA
        for layout in ("contiguous", "offset-1")
    ]
    yield from _grid.cells("P2P-01", cells, 2, 3, by="dtype")
