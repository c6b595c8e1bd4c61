"""`Ratio`: a time divided by that of torch's DDP, or another backend, as reports store it; they never store times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

#: The variant that trains without a DDP and all-reduces as many bytes as gradients have, once: no DDP can be faster.
FLOOR = "no DDP, one all-reduce"
#: The reference of ratios that are also shown as overhead.
DEFAULT = "torch's default"
#: What ends the workload of an operation whose CPU time is compared, or that is issued before a computation; and the
#: reference of that one: the call and the computation, one after the other.
CPU, BESIDE, ONE_BY_ONE = "CPU time", "beside a computation", "one after the other"


def itself(name: str) -> str:
    """Return the variant that compares what is called `name` with a second one of it."""
    return f"{name} itself"


#: The variant that compares torch's DDP with a second copy of itself.
ITSELF = itself("torch")


def quartiles(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of the ratios of values of the same rounds, two or more."""
    lower, median, upper = statistics.quantiles(
        [a / b for a, b in zip(ours, theirs, strict=True)], n=4, method="inclusive"
    )
    return lower, median, upper


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of a contestant divided by that of the reference on one workload: median and quartiles over rounds.

    `variant` names the contestant's options, or a backend. A variant `itself` compares the reference with a second one
    of it: it shows how far noise alone moves a ratio from 1.
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
    def is_noise(self) -> bool:
        """Whether the reference is compared with itself."""
        return self.variant.endswith(itself(""))

    @property
    def noise(self) -> float:
        """Two standard errors of the median, read off the quartiles as if the rounds' ratios were normal."""
        return 2 * 0.93 * (self.upper - self.lower) / math.sqrt(self.rounds)

    @property
    def width(self) -> float:
        """How far from 1 the quartiles reach."""
        return max(self.upper - 1, 1 - self.lower)

    @property
    def inverse(self) -> Ratio:
        """The ratio of what is done in the same time."""
        return replace(self, median=1 / self.median, lower=1 / self.upper, upper=1 / self.lower)

    @property
    def is_sound(self) -> bool:
        """Whether the numbers are possible: quartiles in order and positive, at least one round and one rank."""
        return 0 < self.lower <= self.median <= self.upper and self.rounds > 0 and self.world_size > 0

    def __str__(self) -> str:
        """Return e.g. `0.912 (0.894 - 0.930)`."""
        return f"{self.median:.3f} ({self.lower:.3f} - {self.upper:.3f})"

    def shortly(self) -> str:
        """Return e.g. `0.91 (0.89-0.93)`."""
        return f"{self.median:.2f} ({self.lower:.2f}-{self.upper:.2f})"


def changes(before: Iterable[Ratio], after: Iterable[Ratio]) -> tuple[str, ...]:
    """Return a sentence for every comparison in both whose quartile ranges do not overlap, beyond noise."""
    known = {ratio.compared: ratio for ratio in before}
    return tuple(
        f"time of {new.workload}, {new.variant} over {new.reference}, {new.world_size} ranks: {old} -> {new}"
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


def beside_noise(ratios: Iterable[Ratio]) -> tuple[Ratio, ...]:
    """Return the comparisons with a reference that is also compared with itself."""
    ratios = tuple(ratios)
    noisy = {one.reference for one in ratios if one.is_noise}
    return tuple(one for one in ratios if one.reference in noisy)


def heading(ratios: Iterable[Ratio]) -> str:
    """Return what ratios are about: the step time of a DDP, or operations of a backend."""
    others = dict.fromkeys(one.reference for one in beside_noise(ratios))
    if not others or DEFAULT in others:
        return "Step time beside torch's DDP"
    return f"Operations beside those of {', '.join(others)}"


def slower_than_reference(ratios: Iterable[Ratio]) -> tuple[str, ...]:
    """Return a sentence for every variant that is slower than its reference, beyond the noise of the same run.

    The noise of a workload is the band between the quartiles of the reference against itself; a variant is slower when
    its own quartiles lie above that.
    """
    ratios = beside_noise(ratios)
    bands = {(one.workload, one.world_size): one.upper for one in ratios if one.is_noise}
    return tuple(
        f"{one.workload}, {one.variant}, {one.world_size} ranks: {one} of {one.reference}, and noise ends at {band:.3f}"
        for one in ratios
        if one.variant != FLOOR and not one.is_noise
        for band in [max(1.0, bands.get((one.workload, one.world_size), 1.0))]
        if one.lower > band
    )
