"""The report: whole on disk, the same when read, and honest about shares."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from drivetrain.training.report import RunReport
from tests.compare.made import report


def test_a_report_read_back_is_the_same_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    made = report(flops_per_second=2e9, matmul_flops_per_second=8e9)
    made.write(tmp_path / "report.json")
    assert RunReport.read(tmp_path / "report.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["flops_share"] == 0.25


def test_a_metric_that_is_not_finite_is_strict_json_and_itself_when_read(tmp_path: Path) -> None:
    report(metrics={"accuracy": 0.5, "perplexity": math.inf}).write(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["metrics"] == {
        "accuracy": 0.5,
        "perplexity": None,
    }
    assert RunReport.read(tmp_path / "report.json").metrics["perplexity"] == math.inf


@pytest.mark.parametrize(("achieved", "rate"), [(None, 8e9), (2e9, None), (2e9, 0.0), (8e9, 2e9)])
def test_a_share_of_what_was_not_measured_is_none(achieved: float | None, rate: float | None) -> None:
    assert report(flops_per_second=achieved, matmul_flops_per_second=rate).flops_share is None


@pytest.mark.parametrize("text", ["null", "[1]", "17", '"x"'])
def test_a_file_that_holds_no_report_is_called_that(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match=r"report\.json holds a .*, no report"):
        RunReport.read(tmp_path / "report.json")


@pytest.mark.parametrize(
    ("accuracy", "sentence"),
    [
        (2 / 3, "accuracy 0.6667 is what always answering 好评 gives: the model has learned nothing yet"),
        (0.4, "accuracy 0.4000 < 0.6667, which always answering 好评 gives: the model has learned nothing yet"),
        (0.7, ""),
    ],
)
def test_an_accuracy_that_a_constant_answer_has_is_called_that(accuracy: float, sentence: str) -> None:
    found = report(accuracy=accuracy, data={"largest_class": {"class": "好评", "share": 2 / 3}})
    assert found.chance.startswith(sentence)
    assert bool(found.chance) == found.is_chance == bool(sentence)
    assert found.summary().get("chance", "") == found.chance


def test_an_accuracy_below_the_largest_class_is_no_chance_where_the_other_classes_are_recognised() -> None:
    found = report(accuracy=0.93, data={"largest_class": {"class": "no", "share": 0.95}, "classes": 2})
    rare = found.model_copy(update={"metrics": {**found.metrics, "macro_f1": 0.82}})
    constant = found.model_copy(update={"metrics": {**found.metrics, "macro_f1": 0.48}})
    assert (rare.is_chance, constant.is_chance) == (False, True)


def test_a_report_without_the_largest_class_says_nothing_of_chance() -> None:
    assert not report(accuracy=0.0).is_chance
    assert not report(accuracy=1.0, data={"largest_class": {"class": "a", "share": 1.0}}).is_chance
