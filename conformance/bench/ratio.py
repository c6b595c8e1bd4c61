"""`Ratio`: a step time divided by that of torch's DDP, as reports store it; reports never store times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: The variant that trains without a DDP and all-reduces as many bytes as gradients have, once: no DDP can be faster.
FLOOR = "no DDP, one all-reduce"
#: The variant that compares torch's DDP with a second copy of itself.
ITSELF = "torch itself"
#: The reference of ratios that can be told as overhead.
DEFAULT = "torch's default"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Step time of a contestant divided by that of the reference on one workload: median and quartiles over rounds.

    `variant` names the contestant's options. The variant `torch itself` compares torch's DDP with a second copy of
    itself: it shows how far noise alone moves a ratio from 1.
    """

    workload: str
    variant: str
    reference: str
    world_size: int
    median: float
    lower: float
    upper: float
    rounds: int

    @property
    def compared(self) -> tuple[str, str, str, int]:
        """The comparison: workload, variant, reference and world size."""
        return self.workload, self.variant, self.reference, self.world_size

    @property
    def noise(self) -> float:
        """Two standard errors of the median, read off the quartiles as if the rounds' ratios were normal."""
        return 2 * 0.93 * (self.upper - self.lower) / math.sqrt(self.rounds)

    @property
    def is_sound(self) -> bool:
        """Whether the numbers are possible: quartiles in order and positive, at least one round and one rank."""
        return 0 < self.lower <= self.median <= self.upper and self.rounds > 0 and self.world_size > 0

    def __str__(self) -> str:
        """Return e.g. `0.912 (0.894 - 0.930)`."""
        return f"{self.median:.3f} ({self.lower:.3f} - {self.upper:.3f})"


def changes(before: Iterable[Ratio], after: Iterable[Ratio]) -> tuple[str, ...]:
    """Return a sentence for every comparison in both whose quartile ranges do not overlap, beyond noise."""
    known = {ratio.compared: ratio for ratio in before}
    return tuple(
        f"step time of {new.workload}, {new.variant} over {new.reference}, {new.world_size} ranks: {old} -> {new}"
        for new in after
        if (old := known.get(new.compared)) is not None and (old.upper < new.lower or new.upper < old.lower)
    )


@dataclass(frozen=True, slots=True)
class Overhead:
    """What share of the overhead of torch's default a variant has, with two standard errors.

    Overhead is what a step takes beyond the floor of the same run: 0 is a step without a DDP, 1 is torch's default.
    """

    share: float
    noise: float

    def __str__(self) -> str:
        """Return e.g. `0.69 ± 0.12`."""
        return f"{self.share:.2f} ± {self.noise:.2f}"


def overheads(ratios: Iterable[Ratio]) -> dict[tuple[str, str, str, int], Overhead]:
    """Return the overhead of each variant that was compared with torch's default, by its comparison.

    Workloads in which torch's default is no slower than the floor, beyond noise, have none: nothing can be said there.
    """
    ratios = tuple(ratios)
    floors = {(one.workload, one.world_size): one for one in ratios if one.variant == FLOOR}
    shares = {}
    for one in ratios:
        floor = floors.get((one.workload, one.world_size))
        if floor is not None and one.reference == DEFAULT and 1 - floor.median > floor.noise:
            whole = 1 - floor.median
            share = (one.median - floor.median) / whole
            noise = 0.0 if one is floor else math.hypot(one.noise, (1 - share) * floor.noise) / whole
            shares[one.compared] = Overhead(share, noise)
    return shares


def slower_than_torch(ratios: Iterable[Ratio]) -> tuple[str, ...]:
    """Return a sentence for every variant that is slower than torch's default, beyond the noise of the same run.

    The noise of a workload is the band between the quartiles of torch's DDP against itself; a variant is slower when
    its own quartiles lie above that.
    """
    ratios = tuple(ratios)
    bands = {(one.workload, one.world_size): one.upper for one in ratios if one.variant == ITSELF}
    return tuple(
        f"{one.workload}, {one.variant}, {one.world_size} ranks: {one} of {DEFAULT}, and noise ends at {band:.3f}"
        for one in ratios
        if one.reference == DEFAULT and one.variant not in (FLOOR, ITSELF)
        for band in [max(1.0, bands.get((one.workload, one.world_size), 1.0))]
        if one.lower > band
    )
