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
        """Bring `value`; the result is for `outcome`. `combine` turns what ranks brought into what each gets."""

    def outcome(self, meeting: Any) -> Any:
        """Return what this rank gets; waits for the others."""


def wrappers_of(place: Place) -> Iterator[int]:
    """Return the numbers of the wrappers of a place: they are built there in the same order on every rank."""
    if not hasattr(place, "wrapper_numbers"):
        place.wrapper_numbers = itertools.count()  # type: ignore[attr-defined]
    numbers: Iterator[int] = place.wrapper_numbers  # type: ignore[attr-defined]
    return numbers
