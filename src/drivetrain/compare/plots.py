"""The plots of a comparison, as matplotlib figures: for PNG, for SVG, and for the page.

Text and axes are drawn in INK, which the page replaces by the colour of its text, so that plots follow dark mode.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drivetrain.compare.result_rows import Comparison, Row

INK = "#010203"
# Okabe and Ito 2008, "Color Universal Design": distinguishable for colour-blind readers, seen on white and on black
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#b8a800")
STYLES = ("-", "--", ":", "-.")
MOST_CURVES = 16
MOST_BARS = 48
MOST_POINTS = 300  # of a curve; more cannot be seen
PARTS = ("data", "forward", "backward", "forward_backward", "optimizer", "evaluation", "save")

STYLE: Any = {  # matplotlib types its hundreds of keys one by one
    "svg.fonttype": "none",
    "svg.hashsalt": "drivetrain",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
}


def plots(comparison: Comparison) -> dict[str, Figure]:
    """Returns name → figure, for plots with data."""
    drawn: dict[str, Figure | None] = {}
    with matplotlib.rc_context(STYLE):
        drawn["loss"] = _curves(comparison, "training loss", "epoch", "loss", _loss_points)
        drawn["time"] = _bars(comparison, "samples a second", lambda row: row.mean(lambda r: r.samples_per_second))
        drawn["memory"] = _memory(comparison)
        drawn["utilisation"] = _curves(comparison, "utilisation", "seconds", "share of the device", _utilisation, 1.02)
        drawn["breakdown"] = _breakdown(comparison)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def as_svg(figure: Figure) -> str:
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()


def as_png(figure: Figure) -> bytes:
    content = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(content, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return content.getvalue()


def _curves(
    comparison: Comparison,
    title: str,
    x: str,
    y: str,
    points: Callable[[Row], Sequence[tuple[float, float]]],
    top: float | None = None,
) -> Figure | None:
    """Draws curves. top: of an axis that starts at 0; left out, the axis fits the curves."""
    curves = [(row, found) for row in comparison.completed if len(found := points(row)) > 1]
    if not curves:
        return None
    figure, axes = _figure(height=3.4)
    for number, (row, found) in enumerate(curves[:MOST_CURVES]):
        xs, ys = zip(*thinned(found), strict=True)
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        axes.plot(xs, ys, style, color=COLOURS[number % len(COLOURS)], linewidth=1.2, label=row.label)
    axes.set_title(title + _left_out(len(curves), MOST_CURVES), loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if top is not None:
        axes.set_ylim(0, top)
    axes.legend(fontsize=8, ncols=1 + (len(curves) > 8))
    return figure


def _loss_points(row: Row) -> list[tuple[float, float]]:
    found = next((result.curve for result in row.results if result.curve), [])
    return [(epoch, loss) for epoch, loss in sorted(found) if math.isfinite(loss)]


def _utilisation(row: Row) -> list[tuple[float, float]]:
    return [(at, share) for at, share in row.reports[0].utilisation["series"]] if row.reports else []


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Returns at most `most` points: of each stretch its lowest and its highest, in order, so that spikes stay."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept


def _bars(comparison: Comparison, title: str, value: Callable[[Row], float | None]) -> Figure | None:
    rows = [(row.label, found) for row in comparison.completed if (found := value(row)) is not None]
    return _stacked(title, [label for label, _ in rows], {"": [found for _, found in rows]}) if rows else None


def _memory(comparison: Comparison) -> Figure | None:
    kinds = list(dict.fromkeys(k for row in comparison.completed for report in row.reports for k in report.peak_memory))
    if not kinds:
        return None
    rows = comparison.completed[:MOST_BARS]
    figure, axes = _figure(height=_height(len(rows) * len(kinds)))
    thickness = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        values = [_peak(row, kind) / 2**20 for row in rows]
        places = [i + number * thickness for i in range(len(rows))]
        axes.barh(places, values, thickness, color=COLOURS[number], label=kind)
        _write_values(axes, places, values)
    axes.set_yticks([i + 0.4 - thickness / 2 for i in range(len(rows))], [row.label for row in rows])
    axes.set_title("peak memory, MiB" + _left_out(len(comparison.completed), MOST_BARS), loc="left")
    _finish_bars(axes)
    return figure


def _peak(row: Row, kind: str) -> float:
    return row.mean(lambda report: report.peak_memory.get(kind)) or 0.0


def _breakdown(comparison: Comparison) -> Figure | None:
    rows = [row for row in comparison.completed if any(report.seconds_by_part for report in row.reports)]
    if not rows:
        return None
    names = [name for name in PARTS if any(name in report.seconds_by_part for row in rows for report in row.reports)]
    parts = {name: [_seconds(row, name) for row in rows] for name in names}
    return _stacked("seconds by part", [row.label for row in rows], parts)


def _seconds(row: Row, part: str) -> float:
    return row.mean(lambda report: report.seconds_by_part.get(part, 0.0)) or 0.0


def _stacked(title: str, labels: Sequence[str], parts: dict[str, list[float]]) -> Figure:
    """Draws one horizontal bar a label, its parts one after another."""
    shown = labels[:MOST_BARS]
    figure, axes = _figure(height=_height(len(shown)))
    left = [0.0] * len(shown)
    for number, (name, values) in enumerate(parts.items()):
        axes.barh(range(len(shown)), values[:MOST_BARS], left=left, color=COLOURS[number % len(COLOURS)], label=name)
        left = [a + b for a, b in zip(left, values, strict=False)]
    _write_values(axes, range(len(shown)), left)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set_title(title + _left_out(len(labels), MOST_BARS), loc="left")
    _finish_bars(axes, legend=len(parts) > 1)
    return figure


def _write_values(axes: Axes, places: Sequence[float], values: Sequence[float]) -> None:
    for place, value in zip(places, values, strict=True):
        axes.annotate(f" {value:,.4g}", (value, place), va="center", fontsize=8)


def _finish_bars(axes: Axes, legend: bool = True) -> None:
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    if legend:
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=7)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height))
    axes: Any = figure.subplots()
    return figure, axes


def _height(bars: int) -> float:
    return 1.2 + 0.26 * max(2, bars)


def _left_out(number: int, most: int) -> str:
    return f" (the first {most} of {number})" if number > most else ""
