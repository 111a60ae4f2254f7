"""Metrics of a comparison: the better end is the one that the runs report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drivetrain.compare.columns import columns_of
from drivetrain.compare.directions import better_end
from drivetrain.compare.matrix import Job, build_matrix
from drivetrain.compare.quality import Quality
from drivetrain.errors import UserError
from drivetrain.runtime.hardware import detect
from drivetrain.training.report import RunReport
from drivetrain.training.workload_rules import metric_directions
from drivetrain.workloads.base import BestMetric
from tests.compare.made import comparison, report


def scored(value: float, directions: dict[str, bool] | None, **best: Any) -> RunReport:
    chosen = {"step": 10, "metric": "brier", "value": value, **best}
    return report(metrics={"brier": value, "loss": 1.0, "odd": 1.0}, best=chosen, directions=directions)


def test_a_users_metric_of_which_less_is_better_picks_the_lowest_row(tmp_path: Path) -> None:
    known = {"brier": False, "loss": False}
    made = comparison(
        tmp_path,
        good=[scored(0.1, known, higher_is_better=False), scored(0.11, known, higher_is_better=False)],
        bad=[scored(0.9, known, higher_is_better=False), scored(0.91, known, higher_is_better=False)],
    )
    quality = Quality(made.completed, "brier")
    assert quality.lower
    assert [row.label for row in quality.best] == ["good"]
    better = {column.key: column.better for column in columns_of(made)}
    assert (better["brier"], better["loss"], better["odd"]) == ("low", "low", None)


def test_reports_of_earlier_versions_go_by_the_metrics_name() -> None:
    old = [report(metrics={"accuracy": 0.9, "val_loss": 1.0})]
    assert (better_end(old, "accuracy"), better_end(old, "val_loss")) == ("high", "low")
    assert better_end([*old, scored(0.1, {"accuracy": True})], "accuracy") == "high"
    two = [scored(0.1, {"brier": False}), scored(0.1, {"brier": True})]
    assert better_end(two, "brier") is None, "runs that contradict each other"


def test_a_report_has_the_directions_that_the_run_knows() -> None:
    metrics = {"accuracy": SimpleNamespace(higher_is_better=True), "odd": SimpleNamespace(higher_is_better=None)}
    workload = SimpleNamespace(best_metric=BestMetric("brier", False), metrics=lambda: metrics)
    run = SimpleNamespace(evaluation=SimpleNamespace(metric=None, generation=[]))
    names = ("brier", "loss", "accuracy", "odd", "perplexity", "unheard")
    found = metric_directions(cast(Any, run), cast(Any, workload), names)
    assert found == {"brier": False, "loss": False, "accuracy": True, "perplexity": False}


def test_predictions_are_not_planned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only trainings are planned"):
        build_matrix(tmp_path / "no.yaml", [], [], 1, Job("predict", None, plan=True), tmp_path, detect(), {})
