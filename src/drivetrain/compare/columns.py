"""The columns of a comparison: the value of each, and which end of it is better."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from drivetrain.compare.result_rows import Comparison, Row
from drivetrain.tracking.quantities import rate_text, size_text
from drivetrain.training.report import RunReport

Value = Callable[[RunReport], float | None]
Better = Literal["low", "high"]
LOWER_IS_BETTER = ("loss", "error")  # endings of metrics' names


@dataclass(frozen=True)
class Column:
    """A column. name: for readers. key: for files, with the unit."""

    name: str
    key: str
    value: Callable[[Row], float | None]
    spread: Callable[[Row], float | None]
    show: Callable[[float], str]
    better: Better | None
    mark: Callable[[Row], str] = lambda _: ""  # behind a row's value

    def text(self, row: Row) -> str:
        value, spread = self.value(row), self.spread(row)
        if value is None:
            return ""
        return self.show(value) + (f" ± {self.show(spread)}" if spread is not None else "") + self.mark(row)

    def best(self, comparison: Comparison) -> float | None:
        """Returns the best value; None if there is no better end, or only one value."""
        values = [v for row in comparison.completed if (v := self.value(row)) is not None and math.isfinite(v)]
        if self.better is None or len(set(values)) < 2:
            return None
        return min(values) if self.better == "low" else max(values)


class Figures:
    """The columns for which some row has a figure, and the best figures of each."""

    def __init__(self, comparison: Comparison) -> None:
        rows = comparison.completed
        self.columns = [c for c in _columns(comparison) if any(c.value(row) is not None for row in rows)]
        self._best = {column.key: column.best(comparison) for column in self.columns}

    def is_best(self, row: Row, column: Column) -> bool:
        best = self._best[column.key]
        return best is not None and column.value(row) == best


def _columns(comparison: Comparison) -> list[Column]:
    """Returns the columns. Predictions have no length of their own: their data are repeated until enough batches are
    timed."""
    return [
        _of("time", "seconds", lambda r: r.seconds if r.verb == "train" else None, _seconds, "low"),
        _of("samples/s", "samples_per_second", lambda r: r.samples_per_second, _number, "high"),
        _speed_up(comparison),
        *_memory(comparison),
        _of("utilisation", "utilisation_mean", lambda r: r.utilisation["mean"], _share, "high"),
        _of("peak utilisation", "utilisation_peak", lambda r: r.utilisation["peak"], _share, None),
        *_metrics(comparison),
        _loss_difference(comparison),
        _of("skipped steps", "skipped_steps", lambda r: r.skipped_steps if r.verb == "train" else None, _number, None),
        _of("energy", "energy_joules", lambda r: r.utilisation.get("energy_joules"), _joules, "low"),
    ]


def _of(name: str, key: str, value: Value, show: Callable[[float], str], better: Better | None) -> Column:
    return Column(name, key, lambda row: row.mean(value), lambda row: row.spread(value), show, better)


def _speed_up(comparison: Comparison) -> Column:
    """Returns samples a second over the reference row's: seed by seed, then the mean."""
    reference = comparison.reference

    def ratios(row: Row) -> list[float]:
        if reference is None or row is reference:
            return []
        pairs = zip(row.results, reference.results, strict=False)
        rates = [(a.report.samples_per_second, b.report.samples_per_second) for a, b in pairs if a.report and b.report]
        return [mine / other for mine, other in rates if mine and other]

    def mean(row: Row) -> float | None:
        if row is reference:
            return 1.0 if row.mean(lambda r: r.samples_per_second) else None
        found = ratios(row)
        return statistics.fmean(found) if found else None

    def spread(row: Row) -> float | None:
        found = ratios(row)
        return statistics.stdev(found) if len(found) > 1 else None

    return Column("speed-up", "speed_up", mean, spread, lambda v: f"{v:.2f}", None)


def _memory(comparison: Comparison) -> list[Column]:
    kinds = dict.fromkeys(kind for row in comparison.completed for report in row.reports for kind in report.peak_memory)

    def of(kind: str) -> Column:
        return _of(f"peak {kind}", f"peak_{kind}_bytes", lambda r: r.peak_memory.get(kind), size_text, "low")

    return [of(kind) for kind in kinds]


def _metrics(comparison: Comparison) -> list[Column]:
    """Returns the last evaluation's metrics; the one that decides comes first."""
    names = dict.fromkeys(name for row in comparison.completed for report in row.reports for name in report.metrics)
    first = deciding_metric(comparison)
    ordered = sorted(names, key=lambda name: name != first)

    def of(name: str) -> Column:
        better: Better = "low" if name.endswith(LOWER_IS_BETTER) else "high"
        column = _of(name, name, lambda r: r.metrics.get(name), lambda v: f"{v:.4f}", better)
        return replace(column, mark=_chance) if name == "accuracy" else column

    return [of(name) for name in ordered]


def _chance(row: Row) -> str:
    """Marks an accuracy that always answering the largest class has on some seed."""
    return " (chance)" if any(report.is_chance for report in row.reports) else ""


def deciding_metric(comparison: Comparison) -> str | None:
    reports = [report for row in comparison.completed for report in row.reports]
    return next((report.best["metric"] for report in reports if report.best), None)


def _loss_difference(comparison: Comparison) -> Column:
    difference = functools.cache(comparison.loss_difference)  # reads whole curves
    return Column("loss differs", "largest_loss_difference", difference, lambda _: None, lambda v: f"{v:.1e}", None)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 90 else f"{value / 60:.1f} min"


def _number(value: float) -> str:
    return rate_text(value, 0 if value >= 100 or value == int(value) else 1)


def _share(value: float) -> str:
    return f"{value:.0%}"


def _joules(value: float) -> str:
    return f"{value:,.0f} J"
