"""Reads what the evaluation samples of a run added to its metrics: the units over which a metric varies.

A metric is a sum over units divided by their count: right answers over samples, losses over targets, batch by batch.
"""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from drivetrain.generation.text_metrics import WIN_RATE
from drivetrain.numerics.win_rates import adjusted_win_rate
from drivetrain.workloads.sample_scores import ANSWERS, MEANS

FEWEST_UNITS = 3  # a deviation of two is a guess


@dataclass(frozen=True, eq=False)
class Scores:
    """The units of a metric. sums, counts: (units,). samples: a digest, equal where the samples are the same. wins:
    whether the metric is a win rate, of which a unit is 1, 0, or 0.5 for a tie."""

    sums: np.ndarray
    counts: np.ndarray
    samples: str
    wins: bool = False

    @cached_property
    def parts(self) -> np.ndarray:
        """(units,): how much each unit puts the metric above its value; their mean is 0."""
        value = self.sums.sum() / self.counts.sum()
        found: np.ndarray = (self.sums - value * self.counts) / self.counts.mean()
        return found

    @property
    def variance(self) -> float:
        """The variance of the metric over the units (of a ratio of sums: Cochran 1977, Sampling Techniques, 2.11; of a
        win rate: numerics/win_rates.py)."""
        return adjusted_win_rate(self.sums.tolist()).error ** 2 if self.wins else variance_of_mean(self.parts)

    @cached_property
    def is_share(self) -> bool:
        """Whether each unit is right or wrong, so that the metric is a share of right ones."""
        return bool((self.counts == 1).all() and np.isin(self.sums, (0, 1)).all())

    def is_paired_with(self, other: Scores) -> bool:
        """Returns whether both were evaluated on the same samples, cut alike."""
        return self.samples == other.samples and np.array_equal(self.counts, other.counts)


def variance_of_mean(parts: np.ndarray) -> float:
    return float(parts.var(ddof=1)) / len(parts)


def variance_of_difference(one: Scores, other: Scores) -> float:
    """Returns the variance of the difference of two runs' metrics over the units, in pairs where these are the same."""
    if not one.is_paired_with(other):
        return one.variance + other.variance
    # no two answers may differ: then one is taken to, or a pair of equal runs would have no noise at all
    least = 1 / len(one.parts) ** 2 if all(each.is_share or each.wins for each in (one, other)) else 0.0
    return max(variance_of_mean(one.parts - other.parts), least)


def read_scores(path: Path, metric: str) -> Scores | None:
    """Reads the units of `accuracy`, `loss`, or of a metric that is a mean over samples or answers; None for other
    metrics, and if the run left none that can be used."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            samples = str(kept["references" if ANSWERS + metric in kept else "samples"])
            if metric == "accuracy":
                sums = kept["right"].astype(np.float64)
                counts = np.ones_like(sums)
            elif metric == "loss" or MEANS + metric in kept:
                sums, counts = kept["loss" if metric == "loss" else MEANS + metric].T
            else:
                sums = kept[ANSWERS + metric]
                counts = np.ones_like(sums)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return None
    usable = len(sums) >= FEWEST_UNITS and math.isfinite(float(sums.sum())) and counts.sum() > 0
    return Scores(sums, counts, samples, metric.startswith(WIN_RATE)) if usable else None
