"""Estimates the noise of a difference of two rows' metric: over seeds, and over the samples that are evaluated.

Two groups of rows are compared seed by seed, and on each seed sample by sample. Their difference varies with the seed
and with the choice of the samples. Where all seeds were evaluated on the same samples, the two make a table without
repetition, whose mean has the variance (MS_seeds + MS_samples - MS_rest) / (seeds x samples): Searle, Casella and
McCulloch 1992, Variance Components, section 4.5. Where each seed has samples of its own, the seeds show both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.compare.result_rows import Result, Row
from drivetrain.compare.scores import Scores, variance_of_difference, variance_of_mean

KNOWN = math.inf  # degrees of freedom of a variance that follows from a distribution
# What one seed leaves out: settings that are equal make models that differ, as other seeds do. ONE_SEED times the
# variance over the samples covers both (bench/results/advice.md).
ONE_SEED = 2.1


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
    if len(differences) < 2:
        return _at_one_seed(one, other, metric)
    own = Noise(statistics.variance(differences), len(differences) - 1)
    seeds = own if residual is None else Noise(max(own.variance, residual.variance), residual.freedom)
    over_seeds = seeds.variance / len(differences)
    beside = _beside_seeds(one, other, metric)
    freedom = seeds.freedom * ((over_seeds + beside) / over_seeds) ** 2 if over_seeds else KNOWN if beside else 1.0
    return Noise(over_seeds + beside, freedom)  # Satterthwaite 1946, Biometrics Bulletin 2:110


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
    for seed, result in _results(group):
        value = None if result.report is None else result.report.metrics.get(metric)
        if value is not None:
            found.setdefault(seed, []).append(value)
    return {seed: statistics.fmean(values) for seed, values in found.items()}


def paired(mine: dict[int, float], other: dict[int, float]) -> list[float]:
    """Returns the differences at the seeds that both have."""
    return [mine[seed] - other[seed] for seed in mine if seed in other]


def evaluation_samples(group: Sequence[Row]) -> int | None:
    """Returns how many samples the runs were evaluated on; None if their reports lack it."""
    found = [report.data.get("evaluation_samples") for row in group for report in row.reports]
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _results(group: Sequence[Row]) -> list[tuple[int, Result]]:
    return [(result.seed(number), result) for row in group for number, result in enumerate(row.results)]


def _at_one_seed(one: Sequence[Row], other: Sequence[Row], metric: str) -> Noise | None:
    """Returns the noise over the samples, in pairs where they are the same, with room for what seeds would add."""
    mine, its = _scores(one, metric), _scores(other, metric)
    if not mine or not its:
        binomial = _binomial(one, metric) + _binomial(other, metric)
        return Noise(binomial, KNOWN) if binomial else None
    seed = next((seed for seed in mine if seed in its), None)
    first, second = (next(iter(each.values())) if seed is None else each[seed] for each in (mine, its))
    variance = variance_of_difference(first, second)
    return Noise(ONE_SEED * variance, min(len(first.parts), len(second.parts)) - 1)


def _beside_seeds(one: Sequence[Row], other: Sequence[Row], metric: str) -> float:
    """Returns what the samples add to the variance over several seeds."""
    mine, its = _scores(one, metric), _scores(other, metric)
    pairs = [(mine[seed], its[seed]) for seed in mine if seed in its]
    if len(pairs) < 2:
        return _binomial(one, metric) + _binomial(other, metric)
    first = pairs[0][0]
    if not all(a.is_paired_with(first) and b.is_paired_with(first) for a, b in pairs):
        return 0.0  # the seeds have samples of their own, and so show the noise of these too
    table = np.stack([a.parts - b.parts for a, b in pairs])  # (seeds, units), each row of mean 0
    rest = float((table - table.mean(0)).var(axis=1, ddof=1).sum()) / (len(pairs) - 1)
    return max(0.0, variance_of_mean(table.mean(0)) - rest / table.size)


def _scores(group: Sequence[Row], metric: str) -> dict[int, Scores]:
    """Returns the scores of a group at each seed: those of the first row that has some, since they are equal."""
    found: dict[int, Scores] = {}
    for seed, result in _results(group):
        if seed not in found and (scores := result.scores(metric)) is not None:
            found[seed] = scores
    return found


def _binomial(group: Sequence[Row], metric: str) -> float:
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
