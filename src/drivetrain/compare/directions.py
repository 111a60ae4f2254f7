"""Finds which end of a metric is better, as the runs report it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from drivetrain.training.report import RunReport

Better = Literal["low", "high"]
LOWER_IS_BETTER = ("loss", "error", "perplexity")  # endings of metrics' names, for reports without directions


def better_end(reports: Iterable[RunReport], name: str) -> Better | None:
    """Returns the better end of a metric; None where no run knows it, or runs contradict each other. For
    reports by earlier versions alone it follows from the name."""
    having = [report for report in reports if name in report.metrics]
    found = {higher for report in having if (higher := _higher_is_better(report, name)) is not None}
    if not found and all(report.directions is None for report in having):
        found = {not name.endswith(LOWER_IS_BETTER)}
    if len(found) != 1:
        return None
    return "high" if found == {True} else "low"


def _higher_is_better(report: RunReport, name: str) -> bool | None:
    best = report.best or {}
    decided: bool | None = best.get("higher_is_better") if best.get("metric") == name else None
    return (report.directions or {}).get(name) if decided is None else decided
