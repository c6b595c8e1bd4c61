"""`Ratio`: a step time divided by that of torch's DDP, as reports store it; reports never store times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
