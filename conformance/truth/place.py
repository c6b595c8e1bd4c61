"""`Place`: where the ranks of a group meet, whether they are threads that take turns or processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Place(Protocol):
    """Where the ranks of a group meet: each brings a value and takes one away."""

    @property
    def group(self) -> Any:
        """The process group that it stands for."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    def size(self) -> int:
        """Return the number of ranks."""

    def come(self, of: object, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Bring `value`; `outcome` takes what this returns, and may be what waits for the other ranks.

        All ranks of the group must call it. `of`, the wrapper's number, and `what` name the exchange, the same on all.
        `combine` gets the values of all ranks in their order, and returns for each rank what it takes away.
        """

    def outcome(self, meeting: Any) -> Any:
        """Return what this rank gets; waits for the others."""


def wrapper_numbers(place: Place) -> Iterator[int]:
    """Return the counter from which each wrapper of a place takes its number.

    Ranks build their wrappers in the same order, so wrappers that belong together have the same number.
    """
    if not hasattr(place, "wrapper_numbers"):
        place.wrapper_numbers = itertools.count()  # type: ignore[attr-defined]
    numbers: Iterator[int] = place.wrapper_numbers  # type: ignore[attr-defined]
    return numbers
