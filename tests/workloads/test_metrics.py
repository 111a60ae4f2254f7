"""Metrics against torchmetrics': over ragged batches, with targets that do not count, and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.workloads.metrics import R2, Accuracy, MacroF1, MeanError, Metric
from tests.ranks import RankPool

CLASSES, IGNORED = 5, -100
SIZES = (7, 1, 12)  # of batches

Batches = list[tuple[Tensor, Tensor]]


def classes(ignored: int | None = None, shape: tuple[int, ...] = ()) -> Batches:
    """Of CLASSES one never occurs."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for size in SIZES:
        predictions, targets = (torch.randint(CLASSES - 1, (size, *shape), generator=generator) for _ in range(2))
        if ignored is not None:
            targets[torch.rand(targets.shape, generator=generator) < 0.3] = ignored
        batches.append((predictions, targets))
    return batches


def numbers() -> Batches:
    generator = torch.Generator().manual_seed(2)
    targets = [torch.randn(size, generator=generator) * 3 + 1 for size in SIZES]
    return [(target + torch.randn(len(target), generator=generator), target) for target in targets]


def over(metric: Any, batches: Batches) -> float:
    metric.reset()
    for predictions, targets in batches:
        metric.update(predictions, targets)
    return float(metric.compute())


@pytest.mark.parametrize("ignored", [None, IGNORED, 2])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_shares_of_classes_are_those_of_torchmetrics(ignored: int | None, shape: tuple[int, ...]) -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    batches = classes(ignored, shape)
    accuracy = MulticlassAccuracy(CLASSES, average="micro", ignore_index=ignored)
    assert over(Accuracy(ignored), batches) == pytest.approx(over(accuracy, batches), rel=1e-6)
    macro_f1 = MulticlassF1Score(CLASSES, average="macro", ignore_index=ignored)
    assert over(MacroF1(CLASSES, ignored), batches) == pytest.approx(over(macro_f1, batches), rel=1e-6)


def test_errors_of_numbers_are_those_of_torchmetrics() -> None:
    from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, R2Score

    pairs = [(MeanError(1), MeanAbsoluteError()), (MeanError(2), MeanSquaredError()), (R2(), R2Score())]
    for ours, published in pairs:
        assert over(ours, numbers()) == pytest.approx(over(published, numbers()), rel=1e-5)
        assert ours.higher_is_better == published.higher_is_better


@pytest.mark.parametrize(("words", "value"), [(0.1, 1.0), (0.2, 0.0)])
def test_r2_of_targets_that_are_all_the_same_is_one_only_where_they_are_predicted(words: float, value: float) -> None:
    targets = torch.full((3,), 0.1)
    assert over(R2(), [(torch.full((3,), words), targets)]) == value


def test_nothing_counted_is_zero() -> None:
    none = torch.tensor([IGNORED])
    assert over(Accuracy(IGNORED), [(torch.tensor([1]), none)]) == 0
    assert over(MacroF1(CLASSES, IGNORED), [(torch.tensor([1]), none)]) == 0


def mine(rank_batches: list[Batches]) -> list[float]:
    """Of this rank's batches, by all ranks; the last one by this rank alone."""
    rank = torch.distributed.get_rank()
    values = [over(metric, batches[rank::2]) for metric, batches in zip(metrics(), rank_batches, strict=True)]
    alone = Accuracy()
    alone.distributed_available_fn = lambda: False
    return [*values, over(alone, rank_batches[0][rank::2])]


def metrics() -> list[Metric]:
    return [Accuracy(), MacroF1(CLASSES), MeanError(1), R2()]


def test_ranks_with_different_batches_give_the_value_of_all(ranks: Callable[[int], RankPool]) -> None:
    given = [classes(), classes(), numbers(), numbers()]
    expected = [over(metric, batches) for metric, batches in zip(metrics(), given, strict=True)]
    for rank, (*values, alone) in enumerate(ranks(2).run(mine, given)):
        assert values == pytest.approx(expected)
        assert alone == over(Accuracy(), given[0][rank::2])
