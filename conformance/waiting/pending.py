"""`Pending`: what ranks still work on. Whoever starts something on ranks gets one, and decides when to wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from conformance.errors import present

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A value that is there once the ranks have ended; ask until it has come, and not again.

    `poll` is called with the seconds to wait at most, and returns None while the ranks have not ended.
    """

    poll: Callable[[float], T | None]

    @staticmethod
    def of(value: T) -> Pending[T]:
        """Return one whose value is there already."""
        return Pending(lambda seconds: value)

    @staticmethod
    def waiting_for(compute: Callable[[], T]) -> Pending[T]:
        """Return one that always waits: for what `compute` returns, or raises."""
        return Pending(lambda seconds: compute())

    def within(self, seconds: float) -> T | None:
        """Wait until the value is there, or so many seconds have passed: then None. 0: do not wait.

        Raises what came in the value's place.
        """
        return self.poll(seconds)

    def wait(self) -> T:
        """Wait for the value, however long that takes; raises what came in its place."""
        return present(self.poll(math.inf))

    def then(self, follow: Callable[[T], U]) -> Pending[U]:
        """Return what `follow` makes of the value when it has come."""

        def poll(seconds: float) -> U | None:
            value = self.poll(seconds)
            return None if value is None else follow(value)

        return Pending(poll)
