"""Metrics of a user's file: plain functions over all samples, and what is no metric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.errors import UserError
from drivetrain.workloads.user_metrics import OfAllSamples, metrics_of


def largest_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().max()


def correlation(output: Tensor, target: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([output.flatten(), target.flatten()]))[0, 1])


def over(metric: Any, output: Tensor, target: Tensor, cut: tuple[int, ...]) -> float:
    metric.reset()
    for part_output, part_target in zip(output.split(cut), target.split(cut), strict=True):
        metric.update(part_output, part_target)
    return float(metric.compute())


@pytest.mark.parametrize("cut", [(12,), (5, 7), (1, 4, 4, 3)])
def test_a_function_sees_all_samples_however_batches_are_cut(cut: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    output, target = torch.randn(12, 1, generator=generator), torch.randn(12, 1, generator=generator)
    found = {name: over(metric, output, target, cut) for name, metric in metrics_of(correlation).items()}
    assert found == {"correlation": pytest.approx(correlation(output, target))}


def test_batches_that_were_dealt_to_ranks_are_in_the_samples_order_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 had the first and the third batch, rank 1 the second: a function of neighbours must not notice."""
    target = torch.arange(5.0)
    mine, theirs = [target[:2], target[4:]], [target[2:4]]
    (metric,) = metrics_of(lambda output, _: (output[1:] - output[:-1]).abs().max()).values()
    for part in mine:
        metric.update(part, part)
    metric.distributed_available_fn = lambda: True

    def gathered(parts: list[Any], own: Any, group: Any = None) -> None:
        del group
        parts[:] = [own, [(part, part) for part in theirs]]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gathered)
    assert metric.compute() == 1.0


def test_batches_that_are_padded_to_unlike_lengths_cannot_be_joined() -> None:
    (metric,) = metrics_of(largest_error).values()
    for length in (3, 5):
        metric.update(torch.zeros(2, length), torch.zeros(2, length))
    with pytest.raises(UserError, match=r"(?s)'largest_error' would join .*pad in collate"):
        metric.compute()


def test_functions_and_objects_stand_side_by_side_in_a_dict_or_in_what_makes_one() -> None:
    from torchmetrics import MeanSquaredError

    given = {"worst": largest_error, "squares": MeanSquaredError()}
    for made in (metrics_of(given), metrics_of(lambda: given)):
        output, target = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 4.0])
        assert over(made["worst"], output, target, (1, 1)) == 2.0
        assert over(made["squares"], output, target, (1, 1)) == pytest.approx(2.125)


def test_a_lambda_and_a_bound_method_are_functions_too() -> None:
    class Scorer:
        def score(self, output: Tensor, target: Tensor) -> float:
            return float((output == target).float().mean())

    made = metrics_of({"one": lambda o, t: (o == t).sum(), "two": Scorer().score})
    assert over(made["one"], torch.tensor([1, 2]), torch.tensor([1, 3]), (2,)) == 1
    assert over(made["two"], torch.tensor([1, 2]), torch.tensor([1, 3]), (2,)) == 0.5


def test_what_is_no_metric_is_refused_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        metrics_of({"a": 3, "b": largest_error, "c": "accuracy", "d": OfAllSamples})
    assert [problem.why.split()[0] for problem in caught.value.problems] == [
        "metrics['a']",
        "metrics['c']",
        "metrics['d']",
    ]
    with pytest.raises(UserError, match="metrics gives a list"):
        metrics_of(lambda: [largest_error])


def broken(output: Tensor, target: Tensor) -> float:
    return (output - target).no_such_mean()


def of_vectors(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs()


def needs_two_classes(output: Tensor, target: Tensor) -> float:
    raise ValueError(f"only one class in {len(output)} of {len(target)}")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (broken, "the metric 'broken' failed .*no attribute 'no_such_mean'"),
        (of_vectors, r"the metric 'of_vectors' gives a tensor of shape \(2,\), not one number"),
        (lambda *_: "high", "the metric '<lambda>' gives str, not one number"),
    ],
)
def test_a_function_that_cannot_work_is_refused_when_it_is_tried(function: Any, words: str) -> None:
    (metric,) = metrics_of(function).values()
    with pytest.raises(UserError, match=words):
        metric.try_out(torch.zeros(2), torch.ones(2))


def test_what_few_samples_cannot_give_is_left_to_all_of_them() -> None:
    (metric,) = metrics_of(needs_two_classes).values()
    metric.try_out(torch.zeros(2), torch.ones(2))
    metric.update(torch.zeros(2), torch.ones(2))
    with pytest.raises(UserError, match="ValueError: only one class in 2 of 2"):
        metric.compute()


def of_outputs(output: Tensor) -> Tensor:
    return output.mean()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"one": of_outputs},
            r"metrics\['one'\] cannot be called with an output and a target: it takes \(output: ",
        ),
        ({"three": 3}, r"metrics\['three'\] is of type int, no metric"),
        ({"a class": OfAllSamples}, r"metrics\['a class'\] is a class, no metric: write OfAllSamples\(\)"),
        ([broken], "metrics is a list, in which they have no names"),
    ],
)
def test_what_is_no_metric_is_reported_with_why(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        metrics_of(given)
