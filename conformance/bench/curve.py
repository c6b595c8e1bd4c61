"""`Curve`: how a cost grows with a size, as ratios to one reference of the same run; never as times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """The cost at one size, divided by the reference of the plot: median and quartiles over rounds."""

    size: int
    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        """Return e.g. `12.1 (11.8 - 12.6)`."""
        return f"{self.median:.3g} ({self.lower:.3g} - {self.upper:.3g})"


@dataclass(frozen=True, slots=True)
class Plot:
    """What one figure shows: its title, the name of the size, and what costs are divided by."""

    title: str
    size: str
    reference: str


@dataclass(frozen=True, slots=True)
class Curve:
    """One contestant's cost in one plot; points by growing size."""

    plot: Plot
    contestant: str
    points: tuple[Point, ...]

    @property
    def exponent(self) -> float:
        """With which power of the size the cost grew between the last two sizes: 1 is linear."""
        before, last = self.points[-2:]
        return math.log(last.median / before.median) / math.log(last.size / before.size)

    @property
    def is_linear_at_most(self) -> bool:
        """Whether, between any two neighbouring sizes, the cost grew no more than the size did, beyond noise."""
        return all(
            after.lower / before.upper <= after.size / before.size
            for before, after in zip(self.points, self.points[1:], strict=False)
        )


def steeper_than_linear(curves: Iterable[Curve]) -> tuple[str, ...]:
    """Return a sentence for every curve that grows faster than its size, beyond noise."""
    return tuple(
        f"{one.plot.title}: {one.contestant} grows faster than the {one.plot.size} "
        f"({', '.join(f'{point.size:,}: {point}' for point in one.points)})"
        for one in curves
        if not one.is_linear_at_most
    )
