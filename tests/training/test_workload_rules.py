"""Rules that need the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.training.workload_rules import best_metric, check_workload
from drivetrain.workloads.base import BestMetric
from drivetrain.workloads.loss_contract import Auxiliary
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
    words = {found.field: found for found in caught.value.problems}
    assert words.keys() == {"batch_size", "micro_batch_size", "evaluation.metric", "evaluation.early_stopping"}
    assert "(41) > the training data (40 samples)" in words["batch_size"].why
    assert words["evaluation.metric"].fix == "did you mean accuracy?"


def test_what_fits_passes() -> None:
    run = config(batch_size=40, micro_batch_size=4, evaluation={"metric": "loss", "early_stopping": {"patience": 1}})
    check_workload(run, TinyWorkload(perceptron, Rows(40), Rows(8)))
    check_workload(config(), TinyWorkload(perceptron, splits_batches=False))


class Whole(TinyWorkload):
    """A loss with a teacher, a reference that follows and a statistic."""

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return {"teacher": Auxiliary(build=perceptron), "reference": Auxiliary("moved", mixing=0.5)}

    @property
    def has_statistics(self) -> bool:
        return True


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_what_needs_more_than_one_pass_is_refused_under_pipelines_and_cut_sequences(axis: str) -> None:
    run = config(engine={"name": "mesh", axis: 2}, processes=2)
    with pytest.raises(UserError) as caught:
        check_workload(run, Whole(perceptron, Rows(40)))
    [found] = caught.value.problems
    assert found.field == f"engine.{axis}"
    assert "auxiliary models (teacher, reference) and statistics of the whole batch" in found.why
    assert found.fix.startswith(f"leave {axis} out")
    check_workload(config(engine={"name": "mesh", "tp": 2}, processes=2), Whole(perceptron, Rows(40)))
    check_workload(run, TinyWorkload(perceptron, Rows(40)))


class Twice(TinyWorkload):
    @property
    def second_pass(self) -> str:
        return "a second pass of the model with its adapters off"


def test_a_reference_that_is_the_model_itself_is_refused_in_a_pipeline() -> None:
    with pytest.raises(UserError, match="with its adapters off, and a pipeline's step is one pass of one model"):
        check_workload(config(engine={"name": "mesh", "pp": 2}, processes=2), Twice(perceptron, Rows(40)))
    check_workload(config(engine={"name": "mesh", "cp": 2}, processes=2), Twice(perceptron, Rows(40)))


@pytest.mark.parametrize("precision", ["bf16", "bf16-master"])
def test_a_reference_that_follows_in_small_steps_is_refused_in_16_bits(precision: str) -> None:
    with pytest.raises(UserError, match="reference follows the model in small steps"):
        check_workload(config(precision=precision), Whole(perceptron, Rows(40)))
    check_workload(config(precision="bf16-mixed"), Whole(perceptron, Rows(40)))


def test_the_run_file_may_choose_the_metric_that_decides() -> None:
    workload = TinyWorkload(perceptron, best=("loss", False))
    assert best_metric(config(), workload) == BestMetric("loss", higher_is_better=False)
    chosen = best_metric(config(evaluation={"metric": "accuracy"}), workload)
    assert chosen == BestMetric("accuracy", higher_is_better=True)
    assert best_metric(config(evaluation={"metric": "loss"}), TinyWorkload(perceptron)).higher_is_better is False
