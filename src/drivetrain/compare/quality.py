"""Decides which rows of a comparison are as good as the best by the metric that chooses checkpoints.

Rows are compared in pairs, seed by seed: like seeds start from the same weights and take the same data. A difference
counts if it exceeds its noise, which is made of the seeds' and of the evaluation samples' (metric_noise.py). Rows whose
results are equal by promise are one group, which the metric does not tell apart (equal_rows.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cached_property

from drivetrain.compare.directions import better_end
from drivetrain.compare.equal_rows import groups
from drivetrain.compare.metric_noise import noise_of, residual
from drivetrain.compare.noise import LEVEL, Difference, behind
from drivetrain.compare.result_rows import Row

AS_GOOD = 0.01  # within this share of the best metric rows are equally good, however sure their difference is


class Quality:
    """The metric of rows, in groups of equal results. rows: those that completed."""

    def __init__(self, rows: Sequence[Row], metric: str, level: float = LEVEL) -> None:
        self.metric, self._level = metric, level
        self.groups = [found for group in groups(rows) if (found := [r for r in group if self.of([r]) is not None])]
        self._residual = residual(self.groups, metric)

    @cached_property
    def lower(self) -> bool:
        """Whether less is better. The metric that decides has a direction, and so have others that are judged."""
        reports = (report for group in self.groups for row in group for report in row.reports)
        return better_end(reports, self.metric) == "low"

    @property
    def tells_apart(self) -> bool:
        """Whether there is more than one group: else no difference of the metric could be claimed."""
        return len(self.groups) > 1

    def of(self, rows: Sequence[Row]) -> float | None:
        """Returns the mean over rows and seeds."""
        found = [v for row in rows if (v := row.mean(lambda report: report.metrics.get(self.metric))) is not None]
        return statistics.fmean(found) if found else None

    @cached_property
    def best(self) -> list[Row]:
        """The group with the best mean; of equal ones the first."""

        def badness(group: list[Row]) -> float:
            value = self._mean(group)
            return math.inf if math.isnan(value) else value if self.lower else -value

        return min(self.groups, key=badness)

    def group_of(self, row: Row) -> list[Row]:
        return next(group for group in self.groups if row in group)

    def worse(self) -> list[Row]:
        """Returns the rows of groups that are worse than the best one beyond noise, or whose metric is not finite."""
        found = self._behind
        return [row for number, group in enumerate(self.groups) if number in found for row in group]

    def undecided(self) -> list[Row]:
        """Returns the rows of groups further from the best one than AS_GOOD, by a difference of unknown noise."""
        unknown = [group for group in self.groups if self._is_apart(group) and self.difference(group) is None]
        return [row for group in unknown for row in group]

    def difference(self, group: list[Row]) -> Difference | None:
        """Returns how far a group is from the best one; None if the runs show nothing of its noise."""
        noise = noise_of(group, self.best, self.metric, self._residual)
        if noise is None:
            return None
        return Difference(abs(self._mean(group) - self._mean(self.best)), math.sqrt(noise.variance), noise.freedom)

    def limit(self, group: list[Row]) -> float | None:
        """Returns the largest difference from the best one that is noise; None if it is not known."""
        found = self.difference(group)
        return None if found is None else found.limit(self._level, len(self.groups))

    @cached_property
    def _behind(self) -> frozenset[int]:
        """The numbers of the groups that are worse."""
        endless = {number for number, group in enumerate(self.groups) if not self._is_finite(group)}
        if not self._is_finite(self.best):
            return frozenset()
        measured = {
            number: found
            for number, group in enumerate(self.groups)
            if group is not self.best and number not in endless and (found := self.difference(group)) is not None
        }
        sure = behind(measured, self._level) if measured else []
        return frozenset(endless | {number for number in sure if self._is_apart(self.groups[number])})

    def _is_apart(self, group: list[Row]) -> bool:
        return self._is_finite(group) and not self._is_close(group)

    def _is_finite(self, group: list[Row]) -> bool:
        return math.isfinite(self._mean(group))

    def _is_close(self, group: list[Row]) -> bool:
        mine, best = self._mean(group), self._mean(self.best)
        return mine == best or abs(mine - best) <= AS_GOOD * abs(best)

    def _mean(self, group: list[Row]) -> float:
        value = self.of(group)
        assert value is not None, "groups hold rows that have the metric"
        return value
