"""Decides what a comparison shows: which rows are worse or slower beyond noise, and whether one is ahead of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from drivetrain.compare.chance import is_at_chance
from drivetrain.compare.columns import deciding_metric
from drivetrain.compare.directions import better_end
from drivetrain.compare.noise import LEVEL, Rates, behind
from drivetrain.compare.quality import Quality
from drivetrain.compare.result_rows import Comparison, Row


@dataclass(frozen=True)
class Verdict:
    """The decisions. considered: completed rows with a rate, without those that a CPU computed in an engine's place.

    worse: by the metric. undecided: differ in the metric by more than 1 %, whose noise is not known. unjudged: as good,
    but other programs disturbed all runs. level: as good, and as quick as the quickest but for noise, in their order.
    """

    considered: list[Row]
    rates: Rates
    error_level: float  # of the claims about speed
    quality: Quality | None
    worse: list[Row] = field(default_factory=list)
    undecided: list[Row] = field(default_factory=list)
    unjudged: list[Row] = field(default_factory=list)
    level: list[Row] = field(default_factory=list)

    @property
    def at_chance(self) -> list[Row]:
        return [row for row in self.considered if is_at_chance(row)] if self.quality is not None else []

    @property
    def chosen(self) -> Row | None:
        """The winner, or the first of the rows that are level; None where neither the metric nor speed decides.

        A model that has learned nothing shows nothing about settings that change results.
        """
        if not self.level or self.undecided or self.unjudged:
            return None
        first = self.level[0]
        if self.quality is not None and self.quality.tells_apart and first in self.at_chance:
            return None
        return first

    @property
    def winner(self) -> Row | None:
        """The row that is ahead of all others beyond noise; None if none is."""
        return self.chosen if len(self.level) == 1 and len(self.considered) > 1 else None

    @property
    def slower(self) -> list[Row]:
        """Rows as good as the best, and slower than the quickest of them beyond noise."""
        others = {*self.worse, *self.undecided, *self.unjudged, *self.level}
        return [row for row in self.considered if row not in others]


def judged(comparison: Comparison) -> Verdict:
    """Returns the verdict. The level is shared between the claims about the metric and those about speed."""
    considered = [row for row in with_rates(comparison) if not row.is_stand_in]
    metric = deciding_metric(comparison)
    reports = [report for row in considered for report in row.reports]
    has_end = metric is not None and better_end(reports, metric) is not None
    quality = Quality(considered, metric, LEVEL / 2) if metric is not None and has_end else None
    if quality is not None and quality.groups:
        considered = [row for row in considered if quality.of([row]) is not None]
    else:
        quality = None
    rates, level = Rates(considered), LEVEL / 2 if quality is not None and quality.tells_apart else LEVEL
    worse, undecided = (quality.worse(), quality.undecided()) if quality is not None else ([], [])
    good = [row for row in considered if row not in worse and row not in undecided]
    known = [row for row in good if row in rates.known]
    unjudged = [row for row in good if row not in known] if len(good) > 1 else []
    found = _level(rates, known if unjudged else good, level)
    return Verdict(considered, rates, level, quality, worse, undecided, unjudged, found)


def with_rates(comparison: Comparison) -> list[Row]:
    """Returns the rows that completed on every seed and ran for enough steps to have a steady rate."""
    return [
        row
        for row in comparison.completed
        if row.status == "completed" and row.mean(lambda report: report.samples_per_second)
    ]


def _level(rates: Rates, good: list[Row], level: float) -> list[Row]:
    """Returns the rows that are as quick as the quickest within noise, in the order of the comparison."""
    if len(good) < 2:
        return good
    first = rates.quickest(good)
    slower = behind({row: rates.difference(first, row) for row in good if row is not first}, level)
    return [row for row in good if row not in slower]
