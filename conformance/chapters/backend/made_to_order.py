"""Scenarios of backends that are made where somebody asks for them: other numbers of ranks, more bytes, new calls."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from conformance.chapters.backend.in_backend import MOST_CELLS, BackendGrid
from conformance.chapters.variants import ENDS_SOON, dashed, each
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import OPERATIONS, Place
from conformance.scenario import MAX_DEADLINE_S, Scenario

#: At these numbers of ranks every chapter has scenarios of its own.
OF_ALL_CHAPTERS = (1, 2, 3, 4)
#: More ranks than that make a float32 of `long_tensors` inexact.
_MOST_OF_LONG = 16
_DTYPES = ("float32", "float64", "bfloat16", "int64", "uint8")
_SIZES = (1, 7, 900, 3001, 20_011)
_NUM_MIXED = 8
_SECONDS_PER_RANK, _SECONDS_PER_GIB = 2.0, 60.0
_GIB = 2**30


def cells_of(world_size: int) -> list[Cell]:
    """Return cells of all operations for so many ranks: each dtype in each group, and averages; the rest is drawn."""
    rng = random.Random(world_size)
    groups = ("world", "permuted", "without-0", "ends")
    which = [*product(_DTYPES, groups, [""]), *product(("float32", "float64"), groups, ["AVG"])]
    return [
        Cell(
            operation, dtype, op or rng.choice(("SUM", "MAX", "MIN")), numel=rng.choice(_SIZES), group=group,
            root=rng.randrange(world_size), lifetime=rng.choice(("sync", "wait")),
        )
        for operation in OPERATIONS
        for dtype, group, op in which
    ]  # fmt: skip


def at_world_size(world_size: int) -> Iterator[Scenario]:
    """Yield scenarios with so many ranks: every operation, sums whose order matters, and sequences of calls."""
    deadline = {"deadline_s": max(ENDS_SOON.fields["deadline_s"], _SECONDS_PER_RANK * world_size)}
    for one in BackendGrid("subgroups").cells("GRP-13", cells_of(world_size), world_size, slug="many", together=True):
        yield replace(one, **deadline)
    inexact, also = each("dtype", ("float32", "float64")), ("VAL-18",)
    yield from BackendGrid("values")(
        "VAL-02", "inexact", "same_bits_everywhere", world_size, inexact, also=also, **deadline
    )
    for number in range(_NUM_MIXED):
        yield _mixed(f"mixed-{number}", 100 * world_size + number, world_size, deadline["deadline_s"])


def up_to(num_bytes: int, world_size: int) -> Iterator[Scenario]:
    """Yield scenarios whose longest tensor has 1 MiB, 4 MiB and so on, up to `num_bytes`, and one element more."""
    powers = [4**power for power in range(10, 32) if 4**power <= num_bytes]
    for size, (operation, what) in product(powers, OPERATIONS.items()):
        tensors = [blocks for side in (what.inputs, what.outputs) for blocks in side(Place(0, world_size))]
        parts = max(sum(block.length for block in blocks) for blocks in tensors)
        called = f"{size // _GIB}GiB" if size >= _GIB else f"{size // 2**20}MiB"
        if what.coalesced or world_size > _MOST_OF_LONG:
            continue
        yield from BackendGrid("layouts")(
            "LAY-01", f"{called}-{dashed(operation)}", "long_tensors", world_size,
            arguments={"operation": operation, "numel": size // 4 // parts + 1}, needs=(what.needs,) * bool(what.needs),
            deadline_s=min(MAX_DEADLINE_S, 20 + _SECONDS_PER_GIB * world_size * size / _GIB),
        )  # fmt: skip


def soaked(seed: int, number: int, world_size: int) -> Iterator[Scenario]:
    """Yield `number` scenarios of new cells, and of new sequences, drawn by `seed` and the numbers behind it."""
    for one in range(seed, seed + number):
        given = {"drawn": {"seed": one, "number": MOST_CELLS}, "has_undeclared": True}
        yield from BackendGrid("crossed")("CROSS-01", f"soak-{one}", "operation_cells", world_size, arguments=given)
        yield _mixed(f"soak-{one}", one, world_size)


def _mixed(slug: str, number: int, world_size: int, deadline_s: float = ENDS_SOON.fields["deadline_s"]) -> Scenario:
    given = {"number": number, "length": 50}
    grid = BackendGrid("crossed")
    (made,) = grid("CROSS-02", slug, "mixed_calls", world_size, arguments=given, deadline_s=deadline_s)
    return made
