"""Figures of `ddp-conformance bench` as SVG files, drawn by matplotlib, which the extra `plots` installs."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from conformance.bench.curve import Curve, Plot
from conformance.bench.ratio import FLOOR, Ratio, beside_noise, heading
from conformance.errors import ReportError

_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "ddp-conformance", "svg.fonttype": "none", "font.size": 9}


def draw_growth(curves: Iterable[Curve], folder: Path) -> tuple[Path, ...]:
    """Write one figure per plot, both axes logarithmic, with a dashed line that is linear; return their paths.

    Raises:
        ReportError: matplotlib is not installed, or a file cannot be written.

    """
    by_plot: dict[Plot, list[Curve]] = {}
    for curve in curves:
        by_plot.setdefault(curve.plot, []).append(curve)
    return tuple(_save_figure(_named(plot), folder, lambda: _growth(plot, curves)) for plot, curves in by_plot.items())  # noqa: B023


def draw_ratios(ratios: Iterable[Ratio], folder: Path) -> Path:
    """Write one figure of the times over that of torch's default or another backend; return its path.

    Raises:
        ReportError: matplotlib is not installed, or a file cannot be written.

    """
    shown = beside_noise(ratios)
    return _save_figure("step-times", folder, lambda: _ratios(shown))


def _save_figure(name: str, folder: Path, draw: Callable[[], Any]) -> Path:
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ReportError("figures are drawn by matplotlib: pip install 'ddp-conformance[plots]'") from error
    path = folder / f"{name}.svg"
    with rc_context(_SETTINGS):
        figure = draw()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
        except OSError as error:
            raise ReportError(f"cannot write {path}: {error.strerror}") from error
    return path


def _named(plot: Plot) -> str:
    return re.sub("[^a-z0-9]+", "-", f"{plot.title} by {plot.size}".lower())


def _growth(plot: Plot, curves: Sequence[Curve]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6))
    axes = figure.add_subplot()
    for curve in curves:
        sizes = [point.size for point in curve.points]
        medians = [point.median for point in curve.points]
        spread = [[one.median - one.lower for one in curve.points], [one.upper - one.median for one in curve.points]]
        axes.errorbar(
            sizes, medians, yerr=spread, marker="o", markersize=3, capsize=2, linewidth=1, label=curve.contestant
        )
    first = max(curve.points[0].median for curve in curves)
    ends = (curves[0].points[0].size, curves[0].points[-1].size)
    axes.plot(ends, (first, first * ends[1] / ends[0]), color="grey", linestyle="--", linewidth=0.8, label="linear")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([point.size for point in curves[0].points], [f"{point.size:,}" for point in curves[0].points])
    axes.minorticks_off()
    axes.set_xlabel(plot.size)
    axes.set_ylabel(f"over {plot.reference}", wrap=True)
    axes.set_title(plot.title[0].upper() + plot.title[1:])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _ratios(ratios: Sequence[Ratio]) -> Any:
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys((one.workload, one.world_size) for one in ratios))
    variants = list(dict.fromkeys(one.variant for one in ratios))
    figure = Figure(figsize=(7, 0.45 * len(rows) + 1.6))
    axes = figure.add_subplot()
    for number, variant in enumerate(variants):
        of_variant = [one for one in ratios if one.variant == variant]
        heights = [
            rows.index((one.workload, one.world_size)) + (number + 1) / (len(variants) + 1) - 0.5 for one in of_variant
        ]
        spread = [[one.median - one.lower for one in of_variant], [one.upper - one.median for one in of_variant]]
        colour = "black" if variant == FLOOR else "grey" if of_variant[0].is_noise else None
        axes.errorbar(
            [one.median for one in of_variant], heights, xerr=spread, fmt="o", markersize=3, linewidth=1, color=colour,
            label=variant,
        )  # fmt: skip
    axes.axvline(1, color="grey", linestyle="--", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{workload}, {ranks} ranks" for workload, ranks in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"{heading(ratios)}, as ratios: median and quartiles")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
