"""Scenarios of chapter scale: what holds for few, small and short holds for many, large and long."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    PLAIN,
    SCALARS_ALONE,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    fields,
)
from conformance.scenario import Scenario

_grid = Grid("scale")

#: Beside powers of two, where counters and masks overflow; the first is what a quick run takes.
COUNTS = (257, 63, 64, 65, 129, 600)
#: In float32: just below, at and above 64 KiB and 1 MiB.
EDGES = [[1, length + more] for length in (2**14, 2**18) for more in (-1, 0, 1)]
#: Dtypes in which gloo and NCCL reduce nothing.
SELDOM = ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")

_ALONE = SCALARS_ALONE.named("")
_IDLE = UNUSED | arguments(idle=True)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _counts()
    yield from _train("SCALE-04", "edges", 2, EDGES, (PLAIN, VIEW, SCALARS_ALONE, UNUSED), steps=2)
    for way in (PLAIN, VIEW):
        yield from _train("SCALE-04", "one-of-27-mib", 2, [[1, 7_000_000]], way, steps=2)
        yield from _train("SCALE-04", "several-of-36-mib", 2, [[30, 314_159]], way)
    pairs = [[2, 3], [1, 1]]
    yield from _train("SCALE-05", "260-steps", 2, pairs, (PLAIN, VIEW, UNUSED, SCALARS_ALONE, STATIC), steps=260)
    yield from _train("SCALE-05", "1100-steps", 2, pairs, steps=1100)
    yield from _state("SCALE-05", "260-forwards", 2, buffers=[[3, 2]], steps=260)
    yield from _magnitudes()
    yield from _states()
    yield from _ranks()
    yield from _uses()
    yield from _costs()


def _train(
    requirement: str, slug: str, worlds: Worlds, parameters: list[list[int]], *axes: Axis, **given: Any
) -> Iterator[Scenario]:
    asked = {"parameters": parameters, "steps": 3, **given}
    yield from _grid(requirement, slug, "training_at_scale", worlds, *axes, arguments=asked)


def _counts() -> Iterator[Scenario]:
    idle = _IDLE.named("")
    for count in COUNTS:
        for way in (PLAIN, VIEW):
            pairs = [[count, 2]]
            yield from _train("SCALE-01", str(count), 2, pairs, way)
            yield from _train("SCALE-02", str(count), 2, pairs, idle, way)
            yield from _train("SCALE-03", str(count), 2, pairs, _ALONE, way)
    pairs = [[257, 2]]
    yield from _train("SCALE-01", "257", 3, pairs)
    yield from _train("SCALE-02", "257", 3, pairs, idle)
    yield from _train("SCALE-03", "257", 3, pairs, _ALONE, (PLAIN, _IDLE, STATIC))


def _magnitudes() -> Iterator[Scenario]:
    pairs = [[1, 1000], [3, 1], [2, 257], [1, 3000], [1, 1]]
    ways = (PLAIN.at(2), VIEW, SCALARS_ALONE, UNUSED, PLAIN.at(4))
    for dtype in ("float32", "float64", "float16", "bfloat16", "complex64", "complex128"):
        yield from _train("SCALE-06", dtype, 2, pairs, ways, arbitrary=dtype)


def _state(requirement: str, slug: str, worlds: Worlds, *axes: Variant, **given: Any) -> Iterator[Scenario]:
    yield from _grid(requirement, slug, "state_at_scale", worlds, *axes, arguments=given)


def _states() -> Iterator[Scenario]:
    for slug, world_size, tensors in (
        ("many-and-large", 2, [[65, 5], [11, 2**18 + 1]]),
        ("17", 2, [[17, 5]]),
        ("300", 2, [[300, 5]]),
        ("65", 3, [[65, 5]]),
        ("edges", 2, [[11, 2**14 - 1], [11, 2**14 + 1], [11, 2**18], [11, 300_007]]),
    ):
        yield from _state("SCALE-07", slug, world_size, buffers=tensors, steps=3)
        yield from _state("SCALE-08", slug, world_size, parameters=tensors, buffers=tensors, steps=0)
    # More than 250 MiB, which is what torch's DDP sends at once. A rank is in one phase for seconds.
    chunks = arguments(buffers=[[5, 14_000_000]], dtypes=["float32"]) | fields(deadline_s=60.0)
    for requirement, steps in (("SCALE-07", 2), ("SCALE-08", 0)):
        yield from _state(requirement, "more-than-a-broadcast", 2, chunks, steps=steps)
    tensors = [[len(SELDOM), 1], [len(SELDOM), 33]]
    seldom = arguments(buffers=tensors, dtypes=list(SELDOM))
    for world_size in (2, 3):
        yield from _state("SCALE-09", "forward", world_size, seldom, steps=3)
        yield from _state("SCALE-09", "construction", world_size, seldom, parameters=tensors, steps=0)


def _ranks() -> Iterator[Scenario]:
    """More ranks than a machine has cores: they share them, so that a phase takes its time."""
    pairs = [[5, 3], [1, 257]]
    patient = fields(deadline_s=60.0)
    for world_size in (6, 8, 12):
        yield from _train("SCALE-10", "", world_size, pairs, patient, (PLAIN, _IDLE | SCALARS_ALONE.named("buckets")))


def _uses() -> Iterator[Scenario]:
    for feature, times, needs in (
        ("comm_hook", 70, ("comm_hook",)),
        ("no_sync", 40, ("no_sync",)),
        ("evaluation", 40, ()),
        ("join", 12, ("join",)),
        ("update_process_group", 20, ("update_process_group",)),
        ("wrap", 36, ()),
    ):
        slug, asked = feature.replace("_", "-"), {"feature": feature, "times": times}
        yield from _grid("SCALE-11", slug, "used_often", 2, (PLAIN, VIEW), arguments=asked, needs=needs)


def _costs() -> Iterator[Scenario]:
    """Count: what a step costs by the square of the number of parameters shows with few of them, too."""
    # A recorder keeps what it records, and calls functions of its own.
    unrecorded = fields(recorded=False)
    every = unrecorded | Variant(also=("SCALE-13", "SCALE-14", "SCALE-15"))
    few, many = arguments("20-and-120", numbers=[20, 120]), arguments("500-and-3000", numbers=[500, 3000])
    ways = (PLAIN, VIEW, UNUSED, STATIC, capped("in-buckets", 0.01))
    yield from _grid("SCALE-12", "", "costs_of_a_step", 2, few, ways, every)
    yield from _grid("SCALE-12", "", "costs_of_a_step", 2, many, every | fields(deadline_s=120.0))
    yield from _grid(
        "SCALE-14", "late", "costs_of_a_step", 2, few.named(""), arguments(late=True), (PLAIN, UNUSED), unrecorded
    )
