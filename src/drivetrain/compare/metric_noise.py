"""Estimates the noise of a difference of two rows' metric: over seeds, and over the samples that are evaluated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.compare.result_rows import Row

KNOWN = math.inf  # degrees of freedom of a variance that follows from a distribution


@dataclass(frozen=True)
class Noise:
    """The variance of a difference of two means, and the degrees of freedom of its estimate."""

    variance: float
    freedom: float


def noise_of(one: Sequence[Row], other: Sequence[Row], metric: str, residual: Noise | None) -> Noise | None:
    """Returns the noise of the difference of two groups' metrics, None if the runs show nothing of it.

    residual: the variance of one difference at one seed over all groups, which counts where this pair varies less.
    """
    differences = paired(by_seed(one, metric), by_seed(other, metric))
    sampling = sum(sampling_variance(group, metric) for group in (one, other))
    if len(differences) < 2:
        return Noise(sampling, KNOWN) if sampling else None
    own = Noise(statistics.variance(differences), len(differences) - 1)
    seeds = own if residual is None or own.variance > residual.variance else residual
    over_seeds = seeds.variance / len(differences)
    return Noise(over_seeds + sampling, _freedom(over_seeds, seeds.freedom, sampling))


def residual(groups: Sequence[Sequence[Row]], metric: str) -> Noise | None:
    """Returns the variance of a difference at one seed, from the interaction of groups and seeds (two-way analysis of
    variance without repetition); None if some group lacks a seed of another, or there is one seed."""
    tables = [by_seed(group, metric) for group in groups]
    seeds = tables[0].keys() if tables else frozenset()
    if len(tables) < 2 or len(seeds) < 2 or any(table.keys() != seeds for table in tables):
        return None
    if not all(math.isfinite(value) for table in tables for value in table.values()):
        return None
    of_seed = {seed: statistics.fmean(table[seed] for table in tables) for seed in seeds}
    whole = statistics.fmean(of_seed.values())
    squares = 0.0
    for table in tables:
        mean = statistics.fmean(table.values())
        squares += sum((value - mean - of_seed[seed] + whole) ** 2 for seed, value in table.items())
    freedom = (len(tables) - 1) * (len(seeds) - 1)
    return Noise(2 * squares / freedom, freedom)


def by_seed(group: Sequence[Row], metric: str) -> dict[int, float]:
    """Returns the mean of a group's metric at each seed."""
    found: dict[int, list[float]] = {}
    for row in group:
        for number, result in enumerate(row.results):
            value = None if result.report is None else result.report.metrics.get(metric)
            if value is not None:
                found.setdefault(result.seed(number), []).append(value)
    return {seed: statistics.fmean(values) for seed, values in found.items()}


def paired(mine: dict[int, float], other: dict[int, float]) -> list[float]:
    """Returns the differences at the seeds that both have."""
    return [mine[seed] - other[seed] for seed in mine if seed in other]


def sampling_variance(group: Sequence[Row], metric: str) -> float:
    """Returns the variance of a share of right answers over the evaluation samples, p (1 - p) / n of the binomial
    distribution; 0 for other metrics.

    At no or all answers right, p is taken as by the rule of succession, (hits + 1) / (n + 2): a few samples that are
    all right do not show that none is wrong.
    """
    samples = evaluation_samples(group)
    shares = [v for row in group if (v := row.mean(lambda report: report.metrics.get(metric))) is not None]
    if metric != "accuracy" or samples is None or not shares:
        return 0.0
    share = (statistics.fmean(shares) * samples + 1) / (samples + 2)
    return share * (1 - share) / samples


def evaluation_samples(group: Sequence[Row]) -> int | None:
    """Returns how many samples the runs were evaluated on; None if their reports lack it."""
    found = [report.data.get("evaluation_samples") for row in group for report in row.reports]
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _freedom(over_seeds: float, freedom: float, sampling: float) -> float:
    """Returns the degrees of freedom of a sum with a known variance (Satterthwaite 1946, Biometrics Bulletin 2:110)."""
    if not over_seeds:
        return KNOWN if sampling else freedom
    return round(freedom * ((over_seeds + sampling) / over_seeds) ** 2, 1)
