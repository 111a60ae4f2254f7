"""Estimates how far figures of a comparison differ by chance alone: a difference must exceed this to mean something."""

from __future__ import annotations

import math
from collections.abc import Callable

from drivetrain.compare.result_rows import Row
from drivetrain.training.report import RunReport

# Standard deviation of one run's rate, relative to it. The ratios of seven pairs of like runs had quartiles of 0.935
# and 1.045 (bench/results/comparing.md): a deviation of 0.08 of a ratio, so of 0.06 of a run.
ONE_RUN_VARIES = 0.06
LEAST_SEEDS_VARY = 0.02  # two or three seeds may agree by chance
BEYOND = 2.0  # standard deviations of a difference (or ratio) of two like runs within which 95 % of them lie


def rate_of(row: Row) -> float | None:
    """Returns the mean of samples a second over the seeds."""
    return row.mean(_rate)


def is_beyond_noise(one: Row, other: Row) -> bool:
    """Returns whether the rates of two rows differ by more than repeated runs of one of them do."""
    mine, its = rate_of(one), rate_of(other)
    if not mine or not its:
        return False
    return abs(mine - its) > BEYOND * math.hypot(_rate_deviation(one), _rate_deviation(other))


def standard_error(row: Row, metric: str) -> float:
    """Returns the standard error of a share of right answers over the evaluation samples; 0 for other metrics.

    sqrt(p (1 - p) / n), of the binomial distribution.
    """
    share, samples = row.mean(_metric(metric)), evaluation_samples(row)
    if metric != "accuracy" or samples is None or share is None or not 0 < share < 1:
        return 0.0
    return math.sqrt(share * (1 - share) / samples)


def evaluation_samples(row: Row) -> int | None:
    """Returns how many samples the row's runs were evaluated on; None if their reports lack it."""
    found = [report.data.get("evaluation_samples") for report in row.reports]
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _rate_deviation(row: Row) -> float:
    """Returns the standard deviation of one run's rate: over the seeds, or a measured one for runs of one seed.

    With several seeds the rate is their mean, whose deviation is smaller by the root of their number.
    """
    rate = rate_of(row) or 0.0
    spread = row.spread(_rate)
    if spread is None:
        return ONE_RUN_VARIES * rate
    return max(spread, LEAST_SEEDS_VARY * rate) / math.sqrt(len(row.reports))


def _rate(report: RunReport) -> float | None:
    return report.samples_per_second


def _metric(name: str) -> Callable[[RunReport], float | None]:
    return lambda report: report.metrics.get(name)
