"""Tells a metric for which nothing need be learned: an accuracy no better than that of the evaluation data's largest
class."""

from __future__ import annotations

import math

from drivetrain.compare.result_rows import Row
from drivetrain.compare.statements import Statement, stated
from drivetrain.training.report import RunReport

BEYOND = 1.645  # standard errors that 5 % of accuracies at chance exceed


def is_at_chance(row: Row) -> bool:
    """Returns whether in any run of a row the accuracy is no better than always answering the largest class, but for
    its standard error over the evaluation samples. Other metrics are never at chance."""
    return any(_is_at_chance(report) for report in row.reports)


def chance_level(row: Row) -> Statement:
    """Returns what a constant answer has, for a row that is at chance."""
    largest = next(report.data["largest_class"] for report in row.reports if "largest_class" in report.data)
    return stated("constant_answer", answer=str(largest["class"]), share=f"{largest['share']:.4f}")


def _is_at_chance(report: RunReport) -> bool:
    if report.is_chance:
        return True
    samples, share = report.data.get("evaluation_samples"), report.data.get("largest_class", {}).get("share")
    accuracy = report.metrics.get("accuracy")
    if not isinstance(samples, int) or samples < 1 or share is None or not share < 1 or accuracy is None:
        return False
    error = BEYOND * math.sqrt(share * (1 - share) / samples)
    lowered = {**report.metrics, "accuracy": accuracy - error}
    return report.model_copy(update={"metrics": lowered}).is_chance
