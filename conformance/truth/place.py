"""`Place`: where the ranks of a group, threads that take turns or processes, exchange values."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Place(Protocol):
    """Where the ranks of a group exchange values."""

    @property
    def group(self) -> Any:
        """The process group."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    def size(self) -> int:
        """Return the number of ranks."""

    def arrive(self, of: object, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Bring `value` to a meeting, and return it for `outcome`; only that need wait for the other ranks.

        All ranks of the group must call it. `of`, the wrapper's number, and `what` name the meeting, the same on all
        ranks. `combine` gets the values of all ranks in their order, and returns the result of each.
        """

    def outcome(self, meeting: Any) -> Any:
        """Return this rank's result; waits for the others."""


def wrapper_number(place: Place, copy_of: Any = None) -> tuple[Any, int]:
    """Return the number of a wrapper of a place, or of a copy of the wrapper with the number `copy_of`.

    Ranks build their wrappers in the same order, so corresponding wrappers have the same number. Copies count apart,
    because one rank may make a copy alone.
    """
    if not hasattr(place, "num_wrappers"):
        place.num_wrappers = Counter()  # type: ignore[attr-defined]
    numbers: Counter[Any] = place.num_wrappers  # type: ignore[attr-defined]
    numbers[copy_of] += 1
    return copy_of, numbers[copy_of]
