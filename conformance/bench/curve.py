"""`Curve`: how a cost grows with a size, as ratios to one reference of the same run; never as times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
    def knee(self) -> float | None:
        """The size, interpolated, at which the cost is twice that of the first one; None where it is at none."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            low, high = (one.median / self.points[0].median / 2 for one in (before, after))
            if high >= 1:
                share = -math.log(low) / (math.log(high) - math.log(low))
                return float(before.size * (after.size / before.size) ** share)
        return None

    @property
    def exponent(self) -> float:
        """With which power of the size the cost grew between the last two sizes: 1 is linear."""
        before, last = self.points[-2:]
        return math.log(last.median / before.median) / math.log(last.size / before.size)

    def grows_at_most_as(self, floor: Curve | None) -> bool:
        """Whether, between any two neighbouring sizes, the cost grew no more than the size did, beyond noise.

        Or no more than `floor`, if given, at the same sizes: what does not fit into caches any more is dearer without
        a DDP, too.
        """
        steps = list(zip(self.points, self.points[1:], strict=False))
        allowed = [after.size / before.size for before, after in steps]
        if floor is not None:
            of_floor = zip(floor.points, floor.points[1:], strict=False)
            allowed = [
                max(one, after.upper / before.lower) for one, (before, after) in zip(allowed, of_floor, strict=True)
            ]
        return all(after.lower / before.upper <= most for (before, after), most in zip(steps, allowed, strict=True))


def steeper_than_linear(
    curves: Iterable[Curve], floors: Mapping[Plot, Curve] = MappingProxyType({})
) -> tuple[str, ...]:
    """Return a sentence for every curve that grows faster than its size and than its plot's floor, beyond noise."""
    return tuple(
        f"{one.plot.title}: {one.contestant} grows faster than the {one.plot.size} "
        f"({', '.join(f'{point.size:,}: {point}' for point in one.points)})"
        for one in curves
        if not one.grows_at_most_as(floors.get(one.plot))
    )
