"""Measures the operations of a backend beside those of another on the same ranks in one run, and returns ratios.

The other backend takes part a second time, in a group of its own, which shows how much of a ratio is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conformance.bench.curve import Curve, Plot, Point
from conformance.bench.ratio import BESIDE, CPU, ONE_BY_ONE, Ratio, itself, quartiles
from conformance.subjects.subject import by_itself

if TYPE_CHECKING:
    from conformance.backends.backend import Backend

OPERATIONS = (
    "all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "send_recv",
    "barrier",
)  # fmt: skip
SIZES = (256, 4096, 2**16, 2**20, 2**22)
ROUNDS = 30
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def sized(num_bytes: float) -> str:
    """Return e.g. `64 KiB`, rounded to whole units."""
    unit, name = next(((unit, name) for unit, name in _UNITS if num_bytes >= unit), (1, "B"))
    return f"{num_bytes / unit:.0f} {name}"


@dataclass(frozen=True, slots=True)
class Timed:
    """One operation on so many ranks: seconds by `<contestant>/<size>` and so on, as `operation_time` observes them.

    `seconds` are the slowest rank's in each round, `cpu` what all ranks together computed in a call of the last size.
    """

    operation: str
    world_size: int
    backend: str
    against: str
    sizes: tuple[int, ...]
    seconds: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Sequence[float]]

    @property
    def contestants(self) -> tuple[str, str, str]:
        """The backend, the other one, and that one a second time."""
        return _labels(self.backend, self.against)

    @property
    def by_size(self) -> tuple[tuple[Ratio, Ratio], ...]:
        """For each size the time over that of the other backend, and the other's own over its second time."""
        tested, against, again = self.contestants
        return tuple(
            (
                self._ratio(what, tested, self.against, self.seconds[f"{tested}/{size}"], reference),
                self._ratio(what, again, self.against, self.seconds[f"{again}/{size}"], reference),
            )
            for size in self.sizes
            for what in [f"{self.operation}, {sized(size)}" if len(self.sizes) > 1 else self.operation]
            for reference in [self.seconds[f"{against}/{size}"]]
        )

    def ratios(self) -> Iterator[Ratio]:
        """Yield times over the other backend's by size, CPU time of the last size, and time beside a computation."""
        tested, against, _ = self.contestants
        for pair in self.by_size:
            yield from pair
        if not self.cpu:
            return
        last = f"{self.operation}, {sized(self.sizes[-1])}"
        yield self._ratio(f"{last}, {CPU}", tested, self.against, self.cpu[tested], self.cpu[against])
        for one in (tested, against):
            alone = zip(self.seconds[f"{one}/{self.sizes[-1]}"], self.seconds[f"{one}/computation"], strict=True)
            both = self.seconds[f"{one}/beside"]
            yield self._ratio(f"{last}, {BESIDE}", one, ONE_BY_ONE, both, [call + computed for call, computed in alone])

    def curves(self) -> tuple[Curve, ...]:
        """Return how the time of a call grows with the bytes, over that of the other backend with the fewest."""
        first = sized(self.sizes[0])
        plot = Plot(f"{self.operation} of {self.world_size} ranks", "bytes", f"{self.against}, {first}")
        reference = self.seconds[f"{self.contestants[1]}/{self.sizes[0]}"]
        return tuple(
            Curve(plot, one, tuple(self._point(size, self.seconds[f"{one}/{size}"], reference) for size in self.sizes))
            for one in self.contestants
        )

    def cpu_seconds_per_gib(self) -> dict[str, float]:
        """Return the CPU seconds of all ranks for one GiB in messages of the last size, by contestant."""
        return {one: statistics.median(times) * 2**30 / self.sizes[-1] for one, times in self.cpu.items()}

    def _ratio(
        self, workload: str, variant: str, reference: str, ours: Sequence[float], theirs: Sequence[float]
    ) -> Ratio:
        lower, median, upper = quartiles(ours, theirs)
        return Ratio(workload, variant, reference, self.world_size, median, lower, upper, len(ours))

    def _point(self, size: int, ours: Sequence[float], theirs: Sequence[float]) -> Point:
        lower, median, upper = quartiles(ours, theirs)
        return Point(size, median, lower, upper)


def _labels(backend: str, against: str) -> tuple[str, str, str]:
    other = f"the other {against}" if backend == against else against
    return backend, other, itself(against)


def operations_of(backend: Backend, against: Backend) -> tuple[str, ...]:
    """Return the operations of `OPERATIONS` that both backends have."""
    from conformance.programs.operations.description import CALLED  # here, as below: a table does not wait for torch

    both = backend.capabilities & against.capabilities
    return tuple(name for name in OPERATIONS if CALLED[name].needs in both | {""})


def measure(
    backend: Backend,
    against: Backend,
    operation: str,
    *,
    world_size: int = 2,
    rounds: int = ROUNDS,
    sizes: Sequence[int] = SIZES,
) -> Timed:
    """Time one operation of both backends, in bytes of the largest tensor, or list of them, of a rank.

    Raises `ConformanceError` when a rank does not finish.
    """
    from conformance.bench.measure import WARM_UP_ROUNDS, run_program

    labels = _labels(backend.name, against.name)
    chosen = tuple(sorted(sizes)) if operation != "barrier" else (1,)
    names = ("", against.source or against.name, against.source or against.name)
    arguments = {"contestants": [list(one) for one in zip(labels, names, strict=True)], "sizes": list(chosen)}
    facts = run_program(
        "operation_time", by_itself(backend.name), backend, operation, world_size, rounds,
        {**arguments, "steps_before": 0},
    )  # fmt: skip
    by_round = {
        label: list(zip(*(seen[label] for seen in facts.values()), strict=True))[WARM_UP_ROUNDS:] for label in facts[0]
    }
    seconds = {label: [max(times) for times in rounds_of] for label, rounds_of in by_round.items()}
    cpu = {one: [sum(times) for times in by_round[f"{one}/cpu"]] for one in labels if f"{one}/cpu" in by_round}
    return Timed(operation, world_size, backend.name, against.name, chosen, seconds, cpu)


def run(
    backend: Backend,
    against: Backend,
    *,
    world_sizes: Sequence[int] = (2,),
    rounds: int = ROUNDS,
    operations: Sequence[str] = (),
    progress: Callable[[str], object] = lambda text: None,
) -> Iterator[Timed]:
    """Yield each operation at each number of ranks as it has been measured; raises what `measure` raises."""
    for world_size in world_sizes:
        for operation in operations or operations_of(backend, against):
            progress(f"{operation} of {world_size} ranks")
            yield measure(backend, against, operation, world_size=world_size, rounds=rounds)
