"""`Choose`: a function that makes the choices of a drawn training, by a random generator or a test's rule."""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

_T = TypeVar("_T")


class Choose(Protocol):
    """Chooses one of `options`."""

    def __call__(self, options: Sequence[_T]) -> _T:
        """Return one of `options`."""


def chosen_by(generator: random.Random) -> Choose:
    """Return a `Choose` by `generator`."""

    def choose(options: Sequence[_T]) -> _T:
        return options[generator.randrange(len(options))]

    return choose
