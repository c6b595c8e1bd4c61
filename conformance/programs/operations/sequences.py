"""Sequences of calls, drawn by a number: what came before an operation, and what is under way beside it. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import OPERATIONS
from conformance.programs.operations.groups import members_of

#: In a sequence few sizes and dtypes come again and again: what a backend keeps by them meets what is like it.
_SIZES = (1, 3, 16, 64, 257, 1000, 5000, 20_000)
_DTYPES = ("float32", "float64", "int64", "int32", "float16", "uint8")
_REDUCTIONS = ("SUM", "MAX", "MIN")
_GROUPS = ("world", "twin", "twin#2", "permuted", "without-0", "ends")
#: So many calls at most are under way.
_MOST_BEGUN = (1, 2, 6, 12)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a sequence. `ends` are the numbers of earlier ones that are waited for first, in this order.

    `late`: the rank that comes late; -1 if none does. It `reuses` memory that earlier calls have left, if there is any.
    """

    cell: Cell
    ends: tuple[int, ...] = ()
    late: int = -1
    reuses: bool = False


def sequence(seed: int, length: int, world_size: int) -> tuple[Call, ...]:
    """Return `length` calls, the same on all ranks, who issue them in this order. Every operation has its numbers."""
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
    """Return which of the calls that have begun are waited for now: some, so that fewer than `most` are left."""
    order = list(begun)
    rng.shuffle(order)
    number = max(len(order) - most + 1, rng.randrange(len(order) + 1) if rng.random() < 0.15 else 0)
    return tuple(order[:number])
