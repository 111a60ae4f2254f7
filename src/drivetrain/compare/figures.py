"""The figures of a comparison: its columns in the order of their weight, and which figures are better beyond noise."""

from __future__ import annotations

import math

from drivetrain.compare.columns import Column, columns_of, deciding_metric
from drivetrain.compare.noise import LEVEL, Rates, behind
from drivetrain.compare.quality import Quality
from drivetrain.compare.result_rows import Comparison, Row

# what decides, after the metric that does; of memory the first kind, which is the tensors' or the device's
WEIGHTY = ("samples_per_second", "speed_up", "seconds", "peak_", "largest_loss_difference", "utilisation_mean")
MOST_DECIDING = 6  # columns that fit on a page beside the rows' names


class Figures:
    """The columns for which some row has a figure, and the rows that are best in each."""

    def __init__(self, comparison: Comparison) -> None:
        rows = comparison.completed
        self.columns = [c for c in columns_of(comparison) if any(c.value(row) is not None for row in rows)]
        self._deciding = deciding_metric(comparison)
        self._best = {column.key: _best(rows, column) for column in self.columns}

    def is_best(self, row: Row, column: Column) -> bool:
        """Returns whether a row's figure is not behind the best one beyond noise, while some other row's is."""
        return row in self._best[column.key]

    @property
    def by_weight(self) -> list[Column]:
        """The columns, those that decide first."""
        return sorted(self.columns, key=self._weight)

    @property
    def deciding(self) -> list[Column]:
        """The columns that decide, the weightiest first."""
        weighty = [column for column in self.by_weight if self._weight(column)[0] < len(WEIGHTY)]
        return weighty[:MOST_DECIDING]

    def _weight(self, column: Column) -> tuple[int, int]:
        place = next((number for number, key in enumerate(WEIGHTY) if column.key.startswith(key)), len(WEIGHTY))
        first_peak = next((c for c in self.columns if c.key.startswith("peak_")), None)
        if column.key.startswith("peak_") and column is not first_peak:
            place = len(WEIGHTY)
        return (-1 if column.key == self._deciding else place), self.columns.index(column)


def _best(rows: list[Row], column: Column) -> frozenset[Row]:
    """Returns the rows that are not behind the best of a column; none if no row is, or if nothing is known of the
    column's noise."""
    if column.better is None or column.each is None:
        return frozenset()
    finite = [row for row in rows if (value := column.value(row)) is not None and math.isfinite(value)]
    worse = _worse_metric(finite, column) if column.varies is None else _behind(finite, column, column.varies)
    return frozenset(row for row in finite if row not in worse) if worse else frozenset()


def _worse_metric(rows: list[Row], column: Column) -> list[Row]:
    quality = Quality(rows, column.key, LEVEL)
    return [*quality.worse(), *quality.undecided()] if quality.worse() else []


def _behind(rows: list[Row], column: Column, varies: float) -> list[Row]:
    assert column.each is not None
    figures = Rates(rows, column.each, varies)
    if len(figures.known) < 2:
        return []
    sign = 1 if column.better == "high" else -1
    first = max(figures.known, key=lambda row: sign * (figures.mean(row) or 0.0))
    return behind({row: figures.difference(first, row) for row in figures.known if row is not first}, LEVEL)
