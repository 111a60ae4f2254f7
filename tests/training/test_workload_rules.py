"""Rules that need the data."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.training.workload_rules import best_metric, check_workload
from drivetrain.workloads.base import BestMetric
from tests.tiny_workload import Rows, TinyWorkload, perceptron


def config(**changes: Any) -> RunConfig:
    raw = {"workload": {"type": "module", "path": "tiny.py"}, "batch_size": 16, "loop": {"steps": 1}}
    built, problems = validate(raw | changes, [])
    assert not problems
    assert built is not None
    return built


def test_all_that_the_data_cannot_do_comes_at_once() -> None:
    run = config(batch_size=41, micro_batch_size=4, evaluation={"metric": "acuracy", "early_stopping": {"patience": 1}})
    with pytest.raises(UserError) as caught:
        check_workload(run, TinyWorkload(perceptron, Rows(40), splits_batches=False))
    told = {found.field: found for found in caught.value.problems}
    assert told.keys() == {"batch_size", "micro_batch_size", "evaluation.metric", "evaluation.early_stopping"}
    assert "(41) > the training data (40 samples)" in told["batch_size"].why
    assert told["evaluation.metric"].fix == "did you mean accuracy?"


def test_what_fits_passes() -> None:
    run = config(batch_size=40, micro_batch_size=4, evaluation={"metric": "loss", "early_stopping": {"patience": 1}})
    check_workload(run, TinyWorkload(perceptron, Rows(40), Rows(8)))
    check_workload(config(), TinyWorkload(perceptron, splits_batches=False))


def test_the_run_file_may_choose_the_metric_that_decides() -> None:
    workload = TinyWorkload(perceptron, best=("loss", False))
    assert best_metric(config(), workload) == BestMetric("loss", higher_is_better=False)
    chosen = best_metric(config(evaluation={"metric": "accuracy"}), workload)
    assert chosen == BestMetric("accuracy", higher_is_better=True)
    assert best_metric(config(evaluation={"metric": "loss"}), TinyWorkload(perceptron)).higher_is_better is False
