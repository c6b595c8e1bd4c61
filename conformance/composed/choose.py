"""`Choose`: whoever draws a training, a random generator or a test that always takes the first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

_T = TypeVar("_T")


class Choose(Protocol):
    """Chooses one of `options`; shrinking prefers the earlier ones."""

    def __call__(self, options: Sequence[_T]) -> _T:
        """Return one of `options`."""


def chosen_by(generator: random.Random) -> Choose:
    """Return a chooser that asks `generator`."""

    def choose(options: Sequence[_T]) -> _T:
        return options[generator.randrange(len(options))]

    return choose
