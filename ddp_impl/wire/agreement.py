"""Whether all ranks have the same numbers, found with a sum: several small facts go in one all-reduce."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

#: How long the digests are that ranks compare.
NUM_BYTES = 4


def digest(found: object) -> bytes:
    """Return `NUM_BYTES` bytes that tell what ranks have found apart, by its `repr`."""
    return hashlib.sha256(repr(found).encode()).digest()[:NUM_BYTES]


def to_sum(numbers: Sequence[int]) -> list[int]:
    """Return what each rank must contribute for `are_alike`: twice as many integers as there are `numbers`."""
    return [*numbers, *(number * number for number in numbers)]


def are_alike(sums: Sequence[int], num_ranks: int) -> list[bool]:
    """Return for each number whether the `num_ranks` that contributed had the same; `sums` are of what all did.

    They had if the square of the sum is the sum of the squares times the ranks (Cauchy and Schwarz).
    """
    half = len(sums) // 2
    pairs = zip(sums[:half], sums[half:], strict=True)
    return [total * total == num_ranks * square for total, square in pairs]
