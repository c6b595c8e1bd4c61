"""`Place`: where the ranks of a group meet, whether they are threads that take turns or processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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


def wrapper_number(place: Place, copy_of: Any = None) -> tuple[Any, int]:
    """Return the number of a wrapper of a place, or of one that is the `copy_of` the wrapper with this number.

    Ranks build their wrappers in the same order, so wrappers that belong together have the same number. Copies count
    apart: one rank may make some alone.
    """
    if not hasattr(place, "num_wrappers"):
        place.num_wrappers = Counter()  # type: ignore[attr-defined]
    numbers: Counter[Any] = place.num_wrappers  # type: ignore[attr-defined]
    numbers[copy_of] += 1
    return copy_of, numbers[copy_of]
