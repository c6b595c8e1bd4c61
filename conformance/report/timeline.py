"""Lays the collectives of all ranks out on a common time axis, ready to be drawn."""

from collections.abc import Iterable
from dataclasses import dataclass

from conformance.report.trace import Span, spans
from conformance.verdict import RankFate

WIDTH, LEFT = 1000, 72
LANE_HEIGHT, ROW_HEIGHT, TOP = 8, 18, 22
_CHARACTER_WIDTH = 6.2  # of the 10 px monospaced label
_MIN_WIDTH = 3
_NUM_TICKS = 6

#: Colours are classes of the style sheet; operations that are not listed share one.
_CLASSES = {"all_reduce": "reduce", "broadcast": "broadcast", "all_gather": "gather", "barrier": "barrier"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One collective as a rectangle; `label` is what fits into it, `title` the whole of it."""

    x: float
    y: float
    width: float
    kind: str
    label: str
    title: str
    pending: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """One rank: a name at `y`, and its bars."""

    name: str
    y: float
    height: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """One mark of the axis."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is drawn for one failure."""

    height: float
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    description: str

    @property
    def has_pending(self) -> bool:
        """Whether a rank has not seen to its end what it issued last."""
        return any(bar.pending for lane in self.lanes for bar in lane.bars)


def timeline(ranks: Iterable[RankFate]) -> Timeline | None:
    """Return the drawing of these ranks' collectives, None when no rank issued any."""
    ranks = tuple(ranks)
    of_rank = spans(ranks)
    total_ns = max((span.end_ns for some in of_rank.values() for span in some), default=0)
    if not total_ns:
        return None
    scale = (WIDTH - LEFT - 8) / total_ns
    lanes, y = [], float(TOP)
    for rank in ranks:
        rows = _rows(of_rank[rank.rank], _MIN_WIDTH / scale)
        height = LANE_HEIGHT + ROW_HEIGHT * max(1, len(rows))
        bars = [
            _bar(span, y + LANE_HEIGHT / 2 + ROW_HEIGHT * number, scale)
            for number, row in enumerate(rows)
            for span in row
        ]
        lanes.append(Lane(f"rank {rank.rank}", y, height, tuple(bars)))
        y += height
    return Timeline(y + 4, tuple(lanes), _ticks(total_ns, scale), _description(of_rank))


def _rows(some: tuple[Span, ...], min_ns: float) -> list[list[Span]]:
    """Return the spans in as few rows as keep those that overlap apart."""
    rows: list[list[Span]] = []
    ends: list[float] = []
    for span in sorted(some, key=lambda span: span.start_ns):
        end = max(span.end_ns, span.start_ns + min_ns)
        for number, row_end in enumerate(ends):
            if row_end <= span.start_ns:
                rows[number].append(span)
                ends[number] = end
                break
        else:
            rows.append([span])
            ends.append(end)
    return rows


def _bar(span: Span, y: float, scale: float) -> Bar:
    collective = span.collective
    width = max((span.end_ns - span.start_ns) * scale, _MIN_WIDTH)
    name = f"{collective.op} #{collective.index}"
    labels = [collective.describe(), name, f"#{collective.index}"]
    fitting = [label for label in labels if len(label) * _CHARACTER_WIDTH + 6 <= width]
    facts = [
        collective.describe(),
        f"group {collective.group}" if collective.group not in ("", "default") else "",
        f"in {collective.phase}" if collective.phase else "",
        f"step {collective.step}" if collective.step >= 0 else "",
        f"at {span.start_ns / 1e6:.3f} ms",
        "not seen to finish" if span.pending else f"took {(span.end_ns - span.start_ns) / 1e6:.3f} ms",
    ]
    return Bar(
        x=round(LEFT + span.start_ns * scale, 1),
        y=y,
        width=round(width, 1),
        kind=_CLASSES.get(collective.op, "other"),
        label=fitting[0] if fitting else "",
        title=", ".join(filter(None, facts)),
        pending=span.pending,
    )


def _ticks(total_ns: int, scale: float) -> tuple[Tick, ...]:
    step = 1.0
    while total_ns / step > _NUM_TICKS:
        step *= 2.5 if str(int(step)).startswith("2") else 2  # 1, 2, 5, 10, 20, 50 ...
    marks = [number * step for number in range(int(total_ns / step) + 1)]
    ticks = (Tick(round(LEFT + mark * scale, 2), f"{mark / 1e6:g} ms") for mark in marks)
    return tuple(tick for tick in ticks if tick.x + _CHARACTER_WIDTH * len(tick.label) < WIDTH)  # whose label fits


def _description(of_rank: dict[int, tuple[Span, ...]]) -> str:
    """Return the picture in words, for those who do not see it."""
    parts = []
    for rank, some in of_rank.items():
        last = some[-1] if some else None
        what = "no collective" if last is None else f"last {last.collective.describe()}"
        parts.append(f"rank {rank}: {what}{', not seen to finish' if last is not None and last.pending else ''}")
    return "; ".join(parts)
