"""The plots of a comparison, as matplotlib figures: for PNG, for SVG, and for the page.

Text and axes are drawn in INK, which the page replaces by the colour of its text, so that plots follow dark mode.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drivetrain.compare.noise import rate_of
from drivetrain.compare.result_rows import Comparison, Row
from drivetrain.training.report import RunReport

INK = "#010203"
# Okabe and Ito 2008, "Color Universal Design": distinguishable for colour-blind readers, seen on white and on black
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#b8a800")
# of the parts of a step, apart from the rows' colours: tints of one hue beside the rest in grey
PART_COLOURS = ("#b9c2cf", "#6a7f9e", "#3d5578", "#8f7fb8", "#5b4a8a", "#c2a878", "#8a6f3c")
STYLES = ("-", "--", ":", "-.")
MOST_CURVES = 16
MOST_BARS = 48
MOST_POINTS = 300  # of a curve; more cannot be seen
PARTS = ("data", "answers", "forward", "backward", "forward_backward", "optimizer", "evaluation", "save")

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
        drawn["utilisation"] = _curves(comparison, "utilisation", "seconds", "share of the device", _utilisation, 1.02)
        drawn["time"] = _rates(comparison)
        drawn["memory"] = _memory(comparison)
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


def _rates(comparison: Comparison) -> Figure | None:
    """Draws the mean rates, a line over each bar from the slowest run of its row to the quickest."""
    rows = [row for row in comparison.completed if row.mean(rate_of) is not None]
    if not rows:
        return None
    figure, axes = _figure(height=_height(len(rows[:MOST_BARS])))
    _row_bars(axes, rows[:MOST_BARS], rate_of, "samples a second" + _left_out(len(rows), MOST_BARS))
    return figure


def _row_bars(axes: Axes, rows: Sequence[Row], value: Callable[[RunReport], float | None], title: str) -> None:
    """Draws one bar a row, in the colour of its curve."""
    means = [row.mean(value) or 0.0 for row in rows]
    axes.barh(range(len(rows)), means, color=[COLOURS[i % len(COLOURS)] for i in range(len(rows))])
    highest = []
    for place, (row, mean) in enumerate(zip(rows, means, strict=True)):
        runs = [found for report in row.reports if (found := value(report)) is not None]
        highest.append(max([*runs, mean]))
        if len(runs) > 1:
            axes.plot([min(runs), max(runs)], [place, place], color=INK, linewidth=1.4, marker="|", markersize=7)
    _write_values(axes, range(len(rows)), means, highest)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_title(title, loc="left")
    _finish_bars(axes)


def _memory(comparison: Comparison) -> Figure | None:
    """Draws a panel for each kind of memory, whose sizes may be far apart."""
    kinds = list(dict.fromkeys(k for row in comparison.completed for report in row.reports for k in report.peak_memory))
    if not kinds:
        return None
    rows = comparison.completed[:MOST_BARS]
    figure = Figure(figsize=(7.2, _height(len(rows))))
    panels: Any = figure.subplots(1, len(kinds), sharey=True, squeeze=False)
    left_out = _left_out(len(comparison.completed), MOST_BARS)
    for number, kind in enumerate(kinds):
        _row_bars(panels[0][number], rows, functools.partial(_mebibytes, kind), f"peak {kind}, MiB" + left_out)
        left_out = ""
    return figure


def _mebibytes(kind: str, report: RunReport) -> float | None:
    size = report.peak_memory.get(kind)
    return None if size is None else size / 2**20


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
        colour = PART_COLOURS[number % len(PART_COLOURS)]
        axes.barh(range(len(shown)), values[:MOST_BARS], left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, values, strict=False)]
    _write_values(axes, range(len(shown)), left, left)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set_title(title + _left_out(len(labels), MOST_BARS), loc="left")
    _finish_bars(axes)
    figure.legend(fontsize=8, loc="outside lower center", ncols=len(PARTS))
    return figure


def _write_values(axes: Axes, places: Sequence[float], values: Sequence[float], behind: Sequence[float]) -> None:
    """Writes each value to the right of `behind`, the end of what is drawn."""
    for place, value, end in zip(places, values, behind, strict=True):
        # beside the cap of a bar of errors, which is 3 points wide
        axes.annotate(f"{value:,.4g}", (end, place), (6, 0), textcoords="offset points", va="center", fontsize=8)


def _finish_bars(axes: Axes) -> None:
    if not axes.yaxis_inverted():  # panels that share the axis are turned once
        axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height))
    axes: Any = figure.subplots()
    return figure, axes


def _height(bars: int) -> float:
    return 1.2 + 0.26 * max(2, bars)


def _left_out(number: int, most: int) -> str:
    return f" (the first {most} of {number})" if number > most else ""
