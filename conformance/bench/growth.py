"""Measures how the costs of a DDP grow, beside torch's DDP: with tensors, with ranks, and among simulated ranks.

Sizes take turns as contestants do, so that a curve's points are of one run. Costs are ratios to one of the contestants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.backends.backend import Backend
from conformance.bench.curve import Curve, Plot, Point
from conformance.bench.measure import NO_DDP, WARM_UP_ROUNDS, run_program
from conformance.bench.ratio import quartiles
from conformance.subjects.subject import Subject

TORCH = "torch's DDP"
#: The contestant without a DDP; among real ranks it all-reduces as many bytes as gradients have, once.
ALONE = "no DDP"

#: Rounds of 100,000 tensors take minutes, on a busy machine many.
_DEADLINE_S = 1_800.0

BY_TENSORS = Plot("a step of 2 ranks", "number of tensors", "a step without DDP of the fewest tensors")
BY_RANKS = Plot("a step of 1,000 tensors", "number of ranks", "a step without DDP on as many ranks")
BY_SIMULATED = Plot(
    "wrapping and two steps of 1,000 tensors", "number of simulated ranks", "torch's DDP on the fewest ranks"
)
BY_TENSORS_SIMULATED = Plot(
    "wrapping and two steps among 4,096 simulated ranks", "number of tensors", "torch's DDP with the fewest tensors"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """At which sizes a growth is measured; all in growing order."""

    tensors: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    ranks: tuple[int, ...] = (2, 4, 8, 16, 32)
    simulated: tuple[int, ...] = (2, 16, 128, 1_024, 4_096)
    tensors_simulated: tuple[int, ...] = (100, 1_000, 10_000)


def measure_growth(
    subject: Subject,
    backend: Backend,
    *,
    sizes: Sizes = Sizes(),
    rounds: int = 20,
    progress: Callable[[str], object] = lambda text: None,
) -> tuple[Curve, ...]:
    """Return the curves of all plots; call `progress(text)` before each run.

    Raises `ConformanceError` when a rank does not finish.
    """
    contestants = {subject.name: subject.target, TORCH: "torch", ALONE: NO_DDP}
    measured = _Measured(subject, backend, rounds, progress)
    return (
        *_by_tensors(measured, contestants, sizes.tensors),
        *_by_ranks(measured, contestants, sizes.ranks),
        *_simulated(measured, contestants, BY_SIMULATED, [(size, 1_000, size) for size in sizes.simulated]),
        *_simulated(
            measured, contestants, BY_TENSORS_SIMULATED, [(size, size, 4_096) for size in sizes.tensors_simulated]
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Measured:
    """Runs programs for one subject; returns seconds by label, without the warm-up rounds."""

    subject: Subject
    backend: Backend
    rounds: int
    progress: Callable[[str], object]

    def run(self, program: str, what: str, world_size: int, contestants: Sequence[Any]) -> dict[str, list[float]]:
        """Return for each contestant the seconds of its slowest rank in each round."""
        self.progress(what)
        arguments = {"contestants": [list(one) for one in contestants]}
        facts = run_program(
            program, self.subject, self.backend, what, world_size, self.rounds, arguments, deadline_s=_DEADLINE_S
        )
        return {
            str(label): [max(times) for times in zip(*(seen[label] for seen in facts.values()), strict=True)][
                WARM_UP_ROUNDS:
            ]
            for label, *_ in contestants
        }


def _by_tensors(measured: _Measured, contestants: Mapping[str, str], sizes: Sequence[int]) -> list[Curve]:
    none: dict[str, Any] = {}
    runs = [
        (f"{name}/{size}", target, none, f"{size} tensors") for size in sizes for name, target in contestants.items()
    ]
    seconds = measured.run("step_time", f"{min(sizes):,} to {max(sizes):,} tensors", 2, runs)
    reference = seconds[f"{ALONE}/{sizes[0]}"]
    return [
        Curve(BY_TENSORS, name, tuple(_point(size, seconds[f"{name}/{size}"], reference) for size in sizes))
        for name in contestants
    ]


def _by_ranks(measured: _Measured, contestants: Mapping[str, str], sizes: Sequence[int]) -> list[Curve]:
    points: dict[str, list[Point]] = {name: [] for name in contestants if name != ALONE}
    for size in sizes:
        runs: list[Any] = [(name, target, {}, "1000 tensors") for name, target in contestants.items()]
        seconds = measured.run("step_time", f"{size} ranks", size, runs)
        for name, known in points.items():
            known.append(_point(size, seconds[name], seconds[ALONE]))
    return [Curve(BY_RANKS, name, tuple(known)) for name, known in points.items()]


def _simulated(
    measured: _Measured, contestants: Mapping[str, str], plot: Plot, sizes: Sequence[tuple[int, int, int]]
) -> list[Curve]:
    """`sizes`: that of the plot, the number of tensors, and the number of simulated ranks."""
    runs: list[tuple[Any, ...]] = [
        (f"{name}/{size}", target, f"{tensors} tensors", ranks)
        for size, tensors, ranks in sizes
        for name, target in contestants.items()
    ]
    seconds = measured.run("simulated_peers", f"{plot.title}, by {plot.size}", 1, runs)
    reference = seconds[f"{TORCH}/{sizes[0][0]}"]
    return [
        Curve(plot, name, tuple(_point(size, seconds[f"{name}/{size}"], reference) for size, *_ in sizes))
        for name in contestants
    ]


def _point(size: int, seconds: Sequence[float], reference: Sequence[float]) -> Point:
    lower, median, upper = quartiles(seconds, reference)
    return Point(size, median, lower, upper)
