"""Sequences of calls, drawn by a seed: operations after and beside others."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import OPERATIONS
from conformance.programs.operations.groups import members_of

#: A sequence repeats few of these sizes and dtypes, by which a backend may cache.
_SIZES = (1, 3, 16, 64, 257, 1000, 5000, 20_000)
_DTYPES = ("float32", "float64", "int64", "int32", "float16", "uint8")
_REDUCTIONS = ("SUM", "MAX", "MIN")
_GROUPS = ("world", "twin", "twin#2", "permuted", "without-0", "ends")
#: The most calls in flight.
_MOST_BEGUN = (1, 2, 6, 12)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a sequence, after waits for the earlier calls `ends`, in this order.

    `late`: the rank that calls late; -1: none. It `reuses` memory of earlier calls, if there is any.
    """

    cell: Cell
    ends: tuple[int, ...] = ()
    late: int = -1
    reuses: bool = False


def sequence(seed: int, length: int, world_size: int) -> tuple[Call, ...]:
    """Return `length` calls, the same on all ranks, which issue them in this order. Every operation has seeds."""
    return tuple(_calls(random.Random(seed), seed, length, world_size))


def _calls(rng: random.Random, seed: int, length: int, world_size: int) -> Iterator[Call]:
    sizes, dtypes = rng.sample(_SIZES, 2), rng.sample(_DTYPES, 2)
    groups = rng.sample(_GROUPS, 3)
    names = list(OPERATIONS)
    operations = [names[seed % len(names)], *rng.sample(names, rng.choice((0, 1, 3)))]
    most_begun = rng.choice(_MOST_BEGUN)
    begun: list[int] = []
    for number in range(length):
        is_async = most_begun > 1 and rng.random() < 0.8
        ended = _ended(rng, begun, most_begun)
        begun = [one for one in begun if one not in ended] + [number] * is_async
        cell = Cell(
            rng.choice(operations),
            rng.choice(dtypes),
            rng.choice(_REDUCTIONS),
            numel=rng.choice(sizes),
            root=rng.randrange(world_size),
            group=rng.choice(groups),
            lifetime="wait" if is_async else "sync",
        )
        if cell.what.of_pairs and len(members_of(cell.group, world_size - 1, world_size)) == 1:
            cell = replace(cell, group="world")
        if rng.random() < 0.5 and (by_method := replace(cell, path="group")).is_possible:
            cell = by_method
        late = rng.randrange(world_size) if rng.random() < 0.1 else -1
        yield Call(cell, ended, late, reuses=rng.random() < 0.7)


def _ended(rng: random.Random, begun: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the begun calls that are waited for now, so that fewer than `most` remain."""
    order = list(begun)
    rng.shuffle(order)
    number = max(len(order) - most + 1, rng.randrange(len(order) + 1) if rng.random() < 0.15 else 0)
    return tuple(order[:number])
