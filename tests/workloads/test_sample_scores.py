"""What evaluation batches added to metrics: in the order of the data, and recognised as of the same samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from drivetrain.compare.evaluations import interval
from drivetrain.compare.scores import read_scores
from drivetrain.training.evaluation import scores_of
from drivetrain.workloads.base import Outputs
from drivetrain.workloads.metrics import Accuracy, MeanOfColumn
from drivetrain.workloads.sample_scores import SampleScores, in_order, write_scores
from drivetrain.workloads.user_task import Binary


def scores_of_rank(batches: list[int], classes: int = 3) -> SampleScores:
    """Scores of batches of two samples: batch b has targets b and b + 1, of which the first is answered rightly."""
    scores = SampleScores(by_class=True)
    for b in batches:
        targets = torch.tensor([b % classes, (b + 1) % classes])
        outputs = Outputs(torch.tensor(float(b)), 2, torch.tensor([b % classes, (b + 2) % classes]), targets)
        scores.add(torch.tensor([[float(b), 2.0]], dtype=torch.float64), outputs)
    return scores


def test_batches_of_two_ranks_come_in_the_order_of_the_data() -> None:
    found = in_order([(0, scores_of_rank([0, 2, 4]).parts()), (1, scores_of_rank([1, 3]).parts())])
    assert found["loss"].tolist() == [[b, 2.0] for b in range(5)]
    assert found["right"].tolist() == [True, False] * 5
    assert found["targets"].tolist() == [0, 1, 1, 2, 2, 0, 0, 1, 1, 2]


def test_ranks_that_computed_the_same_batches_count_once() -> None:
    parts = scores_of_rank([0, 1]).parts()
    assert in_order([(0, {}), (0, parts), (0, parts)])["loss"].tolist() == [[0.0, 2.0], [1.0, 2.0]]
    assert in_order([(0, {}), (1, {})]) == {}


def test_an_evaluation_replaces_the_one_before() -> None:
    scores = scores_of_rank([0, 1, 2])
    scores.reset()
    assert scores.parts() == {}


def test_files_tell_whether_the_samples_were_the_same(tmp_path: Path) -> None:
    def digest(name: str, batches: list[int], keep: tuple[str, ...] = ("loss", "right", "targets")) -> str:
        found = in_order([(0, scores_of_rank(batches).parts())])
        write_scores({key: found[key] for key in keep}, tmp_path / name)
        with np.load(tmp_path / name, allow_pickle=False) as kept:
            assert "targets" not in kept
            return str(kept["samples"])

    assert digest("a", [0, 1]) == digest("b", [0, 1]) != digest("c", [1, 0])
    assert digest("d", [0, 1], ("loss",)) == digest("e", [4, 5], ("loss",)), "without targets the counts are compared"


def test_nothing_is_written_without_scores(tmp_path: Path) -> None:
    write_scores({}, tmp_path / "scores.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by_class", [True, False])
def test_answers_that_are_no_class_a_sample_leave_the_loss_alone(by_class: bool) -> None:
    scores = SampleScores(by_class)
    pixels = torch.zeros(2, 4, 4, dtype=torch.long)
    scores.add(torch.ones(1, 2, dtype=torch.float64), Outputs(torch.tensor(1.0), 2, pixels, pixels))
    scores.add(torch.ones(2, 2, dtype=torch.float64), Outputs(torch.tensor(1.0), 2, pixels, pixels))
    assert {name: len(batches) for name, batches in scores.parts().items()} == {"loss": 1}, "two terms have no one mean"


def test_ignored_targets_are_neither_right_nor_wrong() -> None:
    scores = scores_of(cast(Any, SimpleNamespace(metrics=lambda: {"accuracy": Accuracy(-100)})))
    predictions, targets = torch.tensor([1, 2, 0, 1]), torch.tensor([1, -100, -100, 0])
    scores.add(torch.ones(1, 2, dtype=torch.float64), Outputs(torch.tensor(1.0), 2, predictions, targets))
    found = in_order([(0, scores.parts())])
    assert found["right"].tolist() == [True, False]
    assert found["targets"].tolist() == targets.tolist(), "by which runs on the same samples are recognised"


def test_samples_of_several_labels_have_no_answer_of_one_class() -> None:
    task, output = Binary(logits=True), torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    predictions, targets = task.compared(output, torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
    scores = SampleScores(by_class=True)
    scores.add(torch.ones(1, 2, dtype=torch.float64), Outputs(torch.tensor(1.0), 4, predictions, targets))
    assert set(scores.parts()) == {"loss"}
    accuracy = Accuracy()
    accuracy.update(predictions, targets)
    assert accuracy.compute() == 0.75, "over all labels, as before"
    assert task.compared(output[:, :1], output[:, :1])[0].shape == (2,)


def test_means_of_columns_are_kept_sample_by_sample_in_the_order_of_the_data(tmp_path: Path) -> None:
    metrics = {
        "reward_accuracy": MeanOfColumn(0, True),
        "reward_desirable": MeanOfColumn(1, True, weight=2),
        "teacher_agreement": MeanOfColumn(0, True, by_sample=False),  # over tokens, which are no samples
    }
    # of 30 pairs 20 are right; every second one counts for the other metric
    rows = torch.tensor([[float(n < 20), float(n) * (n % 2), float(n % 2)] for n in range(30)])
    ranks = [scores_of(cast(Any, SimpleNamespace(metrics=lambda: metrics))) for _ in range(2)]
    for number, part in enumerate(rows.split(5)):
        outputs = Outputs(part.sum(), 5, part, part)
        ranks[number % 2].add(torch.tensor([[1.0, 5.0], [1.0, 5.0]], dtype=torch.float64), outputs)
    write_scores(in_order([(number, each.parts()) for number, each in enumerate(ranks)]), tmp_path / "scores.npz")
    assert read_scores(tmp_path / "scores.npz", "teacher_agreement") is None
    right = read_scores(tmp_path / "scores.npz", "reward_accuracy")
    assert right is not None
    assert right.sums.tolist() == rows[:, 0].tolist()
    # Wilson's interval of 20 of 30, as statsmodels' proportion_confint(20, 30, method="wilson") gives it
    assert interval(right) == pytest.approx([0.48780, 0.80769], abs=1e-5)
    desirable = read_scores(tmp_path / "scores.npz", "reward_desirable")
    assert desirable is not None
    assert desirable.sums.sum() / desirable.counts.sum() == pytest.approx(float(np.arange(1, 30, 2).mean()))
