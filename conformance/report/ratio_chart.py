"""Lays times beside torch's DDP, or another backend, out on an axis of ratios, ready to be drawn."""

from collections.abc import Iterable
from dataclasses import dataclass

from conformance.bench.ratio import FLOOR, Ratio, beside_noise
from conformance.report.timeline import Tick

WIDTH, LEFT, ROW_HEIGHT, TOP = 1000, 330, 16, 22
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
    """Return the drawing of all ratios to what is also compared with itself, None where there are none."""
    shown = beside_noise(ratios)
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
            kind="noise" if ratio.is_noise else "floor" if ratio.variant == FLOOR else "measured",
            title=f"{ratio.workload}, {ratio.variant}, {ratio.world_size} ranks: {ratio} of {ratio.reference}",
        )
        for number, ratio in enumerate(shown)
    ]
    marks = [number * _TICK_EVERY for number in range(int(right / _TICK_EVERY) + 1)]
    ticks = [Tick(x_of(mark), f"{mark:.1f}") for mark in marks if left <= mark <= right]
    return RatioChart(TOP + ROW_HEIGHT * len(rows) + 6, tuple(rows), tuple(ticks), x_of(1))
