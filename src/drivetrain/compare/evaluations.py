"""Sets evaluations of several models side by side: confidence intervals, and differences over the same samples.

The interval of a share of right answers is Wilson's (Wilson 1927, JASA 22:209), which holds near 0 and 1 too, that of a
win rate with ties Bonett's and Price's (numerics/win_rates.py); those of other means, and of differences, take the
variance over samples or batches and Student's t. Each interval covers LEVEL by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.compare.noise import critical
from drivetrain.compare.scores import Scores, variance_of_difference
from drivetrain.numerics.win_rates import adjusted_win_rate

LEVEL = 0.95


@dataclass(frozen=True)
class Evaluation:
    """One model on one data set. result: {"checkpoint", "metrics", "samples", "seconds"}; None where it failed, with
    the reason. scores: metric → what the samples added to it, where that is known. errors: standard errors in place of
    those that the scores show."""

    model: str
    data: str | None
    result: dict[str, Any] | None
    scores: dict[str, Scores]
    failure: str | None = None
    errors: Mapping[str, float | None] | None = None

    @property
    def standard_errors(self) -> dict[str, float | None]:
        """metric → its standard error; None where it cannot be estimated."""
        own = {
            name: math.sqrt(scores.variance) if len(scores.sums) > 1 else None for name, scores in self.scores.items()
        }
        return {**own, **(self.errors or {})}

    @property
    def metrics(self) -> dict[str, float]:
        return {} if self.result is None else self.result["metrics"]


def table_of(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Returns a row of each evaluation: {"model", "data", "checkpoint", "samples", "seconds", "metrics",
    "standard_errors", "intervals", "differences", "failure"}.

    intervals: metric → [low, high]. differences: metric → {"value", "interval", "paired"}, from the first evaluation on
    the same data that did not fail; paired: over the same samples. Metrics without known noise have neither.
    """
    return list(_rows(evaluations))


def _rows(evaluations: Sequence[Evaluation]) -> Iterator[dict[str, Any]]:
    first: dict[str | None, Evaluation] = {}
    for each in evaluations:
        reference = None if each.result is None else first.setdefault(each.data, each)
        yield {
            "model": each.model,
            "data": each.data,
            **{name: (each.result or {}).get(name) for name in ("checkpoint", "samples", "seconds")},
            "metrics": each.metrics,
            "standard_errors": each.standard_errors,
            "intervals": {name: interval(scores) for name, scores in each.scores.items()},
            "differences": {} if reference in (None, each) else _differences(each, reference),
            "failure": each.failure,
        }


def _differences(one: Evaluation, other: Evaluation | None) -> dict[str, Any]:
    assert other is not None, "the first evaluation has none to differ from"
    both = {name: (scores, other.scores[name]) for name, scores in one.scores.items() if name in other.scores}
    return {name: difference(*pair) for name, pair in both.items() if min(len(each.sums) for each in pair) > 1}


def interval(scores: Scores) -> list[float]:
    """Returns the ends of the interval that covers the metric with probability LEVEL."""
    count, value = len(scores.sums), float(scores.sums.sum() / scores.counts.sum())
    z = critical(1 - LEVEL, 2, math.inf)
    if scores.is_share:
        middle, scale = value + z * z / (2 * count), 1 + z * z / count
        half = z * math.sqrt(value * (1 - value) / count + (z / (2 * count)) ** 2)
        return [max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)]
    if scores.wins:
        middle, error = adjusted_win_rate(scores.sums.tolist())
        return [max(0.0, middle - z * error), min(1.0, middle + z * error)]
    half = critical(1 - LEVEL, 2, count - 1) * math.sqrt(scores.variance)
    return [value - half, value + half]


def difference(one: Scores, other: Scores) -> dict[str, Any]:
    """Returns {"value", "interval", "paired"} of one minus the other."""
    value = float(one.sums.sum() / one.counts.sum() - other.sums.sum() / other.counts.sum())
    freedom = min(len(one.parts), len(other.parts)) - 1
    half = critical(1 - LEVEL, 2, freedom) * math.sqrt(variance_of_difference(one, other))
    return {"value": value, "interval": [value - half, value + half], "paired": one.is_paired_with(other)}
