"""Estimates how far rates of a comparison differ by chance alone: a difference must exceed this to mean something.

Rates are compared as logarithms, since the noise of a rate grows with it. The deviation of a run from its row's mean is
estimated over the seeds of all rows together; a pair of rows that varies more than the others counts with its own.

Two limits serve two claims. That one row is ahead of all others needs no more than Student's t between the first and
the second: of more equal rows the first two lie closer together than two alone do. That some row is behind the first
needs Tukey's studentized range, which holds for all pairs at once (Tukey 1953, "The problem of multiple comparisons";
Kramer 1956, Biometrics 12:307, for rows of unequal numbers).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from drivetrain.compare.result_rows import Row
from drivetrain.training.report import RunReport

# Share of comparisons of equal rows in which some difference is claimed, for normal noise. That of real runs is not
# quite normal: with this level the share stays below 5 % (bench/results/advice.md).
LEVEL = 0.03
# Standard deviation of one run's rate, relative to it, and the degrees of freedom of that. The ratios of seven pairs
# of like runs had quartiles of 0.935 and 1.045 (bench/results/comparing.md): a deviation of 0.08, so of 0.06 of a run.
ONE_RUN_VARIES = 0.06
ONE_RUN_FREEDOM = 6
LEAST_SEEDS_VARY = 0.02  # a few seeds may agree by chance
FEWEST_STRETCHES, MOST_STRETCHES = 4, 8  # of a run, whose mean rates show how it varied within


def critical(level: float, means: int, freedom: float) -> float:
    """Returns how many standard errors the largest difference of `means` equal means exceeds with probability `level`.

    freedom: degrees of the variance's estimate; inf for one that is known. For two means it is Student's t. As in a
    printed table, degrees in between are rounded down.
    """
    step = 1 if freedom < 30 else 10 if freedom < 200 else 200
    return _critical(level, means, freedom if math.isinf(freedom) else max(1, int(freedom // step) * step))


@functools.cache
def _critical(level: float, means: int, freedom: float) -> float:
    from scipy.stats import studentized_range, t  # takes a second

    if means == 2:
        return float(t.isf(level / 2, freedom))
    return float(studentized_range.ppf(1 - level, means, freedom)) / math.sqrt(2)


@dataclass(frozen=True)
class Difference:
    """How far two means differ. error: the standard error; freedom: degrees of its estimate."""

    value: float
    error: float
    freedom: float

    def exceeds(self, level: float, means: int = 2) -> bool:
        """Returns whether it is beyond the noise of `means` equal means."""
        return abs(self.value) > self.limit(level, means)

    def limit(self, level: float, means: int = 2) -> float:
        """Returns the largest difference that is noise."""
        return critical(level, means, self.freedom) * self.error

    @property
    def ratio(self) -> float:
        """The difference of two logarithms as a ratio."""
        return math.exp(self.value)

    def ratios(self, level: float) -> tuple[float, float]:
        """Returns the lowest and the highest ratio that noise allows."""
        limit = self.limit(level)
        return math.exp(self.value - limit), math.exp(self.value + limit)


Item = TypeVar("Item")


def behind(others: Mapping[Item, Difference], level: float) -> list[Item]:
    """Returns which of the others are behind the first. others: how far the first is ahead of each.

    All of them, if each is beyond the noise of a pair; else those beyond the noise of all pairs.
    """
    means = 2 if all(each.exceeds(level) for each in others.values()) else 1 + len(others)
    return [name for name, each in others.items() if each.exceeds(level, means)]


def rate_of(report: RunReport) -> float | None:
    return report.samples_per_second


class Rates:
    """The rates of rows, or another positive figure of theirs, and the noise that they share. varies: the standard
    deviation that one run is taken to have, relative to its figure."""

    def __init__(
        self,
        rows: Sequence[Row],
        figure: Callable[[RunReport], float | None] = rate_of,
        varies: float = ONE_RUN_VARIES,
    ) -> None:
        self.rows, self._figure, self._varies = rows, figure, varies
        found = {row: [figure(report) for report in counted(row)] for row in rows}
        logarithms = {row: [math.log(each) for each in figures if each] for row, figures in found.items()}
        self._logarithms = {row: values for row, values in logarithms.items() if values}
        self._freedom = sum(len(values) - 1 for values in self._logarithms.values())
        squares = sum(_squares(values) for values in self._logarithms.values())
        self._variance = squares / self._freedom if self._freedom else 0.0

    def mean(self, row: Row) -> float | None:
        """Returns the geometric mean of a row's samples a second; None if none of its runs has a rate that counts."""
        values = self._logarithms.get(row)
        return None if values is None else math.exp(statistics.fmean(values))

    @property
    def known(self) -> list[Row]:
        """The rows whose rate is known."""
        return [row for row in self.rows if row in self._logarithms]

    def quickest(self, rows: Sequence[Row]) -> Row:
        """Returns the quickest of rows whose rates are known."""
        return max(rows, key=lambda row: self.mean(row) or 0.0)

    def difference(self, one: Row, other: Row) -> Difference:
        """Compares two rows whose rates are known."""
        value = statistics.fmean(self._logarithms[one]) - statistics.fmean(self._logarithms[other])
        variance, freedom = self._variance_of(one, other)
        return Difference(value, math.sqrt(variance), freedom)

    def _variance_of(self, one: Row, other: Row) -> tuple[float, float]:
        """Returns the variance of the difference of two rows' means, and its degrees of freedom."""
        pair = [self._logarithms[one], self._logarithms[other]]
        least = min(LEAST_SEEDS_VARY, self._varies) ** 2
        if min(map(len, pair)) < 2:
            alone = [max(self._varies**2, self._variance, self._within(row)) for row in (one, other)]
            return sum(each / len(v) for each, v in zip(alone, pair, strict=True)), ONE_RUN_FREEDOM
        shared = sum(max(self._variance, least) / len(values) for values in pair)
        own = sum(max(_squares(values) / (len(values) - 1), least) / len(values) for values in pair)
        return max(shared, own), self._freedom

    def _within(self, row: Row) -> float:
        return variance_within(row.results[0].rates) if self._figure is rate_of else 0.0


def counted(row: Row) -> list[RunReport]:
    """Returns the runs whose rates count: those that other programs did not disturb, or of several runs all of them
    where fewer than two are left, since then their spread shows the disturbance."""
    undisturbed = [r.report for r in row.results if r.report is not None and not r.outcome.is_disturbed]
    return undisturbed if len(row.reports) < 2 or len(undisturbed) > 1 else row.reports


def _squares(values: Sequence[float]) -> float:
    """Returns the sum of squared deviations from the mean."""
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)


def variance_within(rates: Sequence[float]) -> float:
    """Returns the variance of the mean of a run's logarithm of the rate, as far as the run itself shows it; 0 if its
    curve has too few points. rates: between the points.

    Rates of neighbouring points depend on each other, so means of stretches are compared (batch means: Law and Kelton
    2000, section 9.5). The first point is left out: its steps are not steady.
    """
    steady = [rate for rate in rates[1:] if rate > 0]
    number = min(MOST_STRETCHES, len(steady) // 2)
    if number < FEWEST_STRETCHES:
        return 0.0
    cuts = [len(steady) * i // number for i in range(number + 1)]
    means = [math.log(statistics.fmean(steady[a:b])) for a, b in itertools.pairwise(cuts)]
    return _squares(means) / (number - 1) / number
