"""Lays step times beside torch's DDP out on an axis of ratios, ready to be drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conformance.bench.ratio import DEFAULT, FLOOR, ITSELF, Ratio
from conformance.report.timeline import Tick

WIDTH, LEFT, ROW_HEIGHT, TOP = 1000, 330, 16, 22
_KINDS = {FLOOR: "floor", ITSELF: "noise"}
#: What is slower than this is drawn here, at the end of the axis.
_LONGEST = 3.0
_TICK_EVERY = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One variant of one workload: a line from quartile to quartile and a mark at the median."""

    y: float
    label: str
    lower: float
    median: float
    upper: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class RatioChart:
    """What is drawn: rows, marks of the axis, and where the ratio is 1."""

    height: float
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    one: float


def ratio_chart(ratios: Iterable[Ratio]) -> RatioChart | None:
    """Return the drawing of all ratios to torch's default, None where there are none."""
    shown = [ratio for ratio in ratios if ratio.reference == DEFAULT]
    if not shown:
        return None
    left = min(1 - _TICK_EVERY, *(ratio.lower for ratio in shown))
    right = min(_LONGEST, max(1 + _TICK_EVERY, *(ratio.upper for ratio in shown)))
    scale = (WIDTH - LEFT - 12) / (right - left)

    def x_of(ratio: float) -> float:
        return round(LEFT + (min(ratio, right) - left) * scale, 1)

    rows = [
        Row(
            y=TOP + ROW_HEIGHT * (number + 0.5),
            label=f"{ratio.workload}, {ratio.variant}",
            lower=x_of(ratio.lower),
            median=x_of(ratio.median),
            upper=x_of(ratio.upper),
            kind=_KINDS.get(ratio.variant, "measured"),
            title=f"{ratio.workload}, {ratio.variant}, {ratio.world_size} ranks: {ratio} of {DEFAULT}",
        )
        for number, ratio in enumerate(shown)
    ]
    marks = [number * _TICK_EVERY for number in range(int(right / _TICK_EVERY) + 1)]
    ticks = [Tick(x_of(mark), f"{mark:.1f}") for mark in marks if left <= mark <= right]
    return RatioChart(TOP + ROW_HEIGHT * len(rows) + 6, tuple(rows), tuple(ticks), x_of(1))
