"""The options of a classifier's loss against PyTorch's losses, scikit-learn's weights and the papers' formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.workload import ClassLoss
from drivetrain.errors import UserError
from drivetrain.workloads.class_loss import ClassificationLoss

CLASSES = ["bird", "cat", "dog"]
LABELS = np.array([0] * 6 + [1] * 3 + [2] * 1)


def loss_of(**config: Any) -> ClassificationLoss:
    return ClassificationLoss(ClassLoss(**config), CLASSES, LABELS)


@pytest.fixture
def logits() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(LABELS), 3, generator=generator, requires_grad=True)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


def test_without_options_it_is_cross_entropy_summed_over_the_samples(logits: Tensor) -> None:
    labels = torch.from_numpy(LABELS)
    assert torch.equal(loss_of()(logits, labels), F.cross_entropy(logits, labels, reduction="sum"))


def test_weights_by_class_are_pytorchs_over_the_whole_data_set(logits: Tensor) -> None:
    labels, weight = torch.from_numpy(LABELS), torch.tensor([1.0, 5.0, 0.5])
    ours = loss_of(class_weights=[1.0, 5.0, 0.5])(logits, labels) / len(labels)
    theirs = nn.CrossEntropyLoss(weight=weight)(logits, labels)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient(ours, logits), gradient(theirs, logits))


def test_named_weights_leave_the_others_at_one() -> None:
    named, listed = loss_of(class_weights={"cat": 5.0}), loss_of(class_weights=[1.0, 5.0, 1.0])
    assert named.weights is not None
    assert listed.weights is not None
    assert torch.equal(named.weights, listed.weights)


def test_numbers_may_name_classes_that_are_numbers() -> None:
    found = ClassificationLoss(ClassLoss(class_weights={1: 3.0}), ["0", "1"], np.array([0, 0, 1])).weights
    assert found is not None
    assert found.tolist() == pytest.approx([0.6, 1.8])


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    found = loss_of(class_weights="balanced").weights
    assert found is not None
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("config", [{"class_weights": "balanced"}, {"focal_gamma": 2.0}, {"label_smoothing": 0.1}])
def test_the_loss_of_a_batch_is_the_sum_of_those_of_its_parts(config: dict[str, Any], logits: Tensor) -> None:
    labels, loss = torch.from_numpy(LABELS), loss_of(**config)
    parts = [loss(logits[part], labels[part]) for part in (slice(0, 3), slice(3, 4), slice(4, 10))]
    torch.testing.assert_close(sum(parts), loss(logits, labels))


def test_smoothed_targets_are_pytorchs(logits: Tensor) -> None:
    labels = torch.from_numpy(LABELS)
    theirs = nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum")(logits, labels)
    torch.testing.assert_close(loss_of(label_smoothing=0.2)(logits, labels), theirs)


def test_focal_loss_is_the_papers_formula(logits: Tensor) -> None:
    labels = torch.from_numpy(LABELS)
    likely = logits.softmax(-1)[torch.arange(len(labels)), labels]
    weight = torch.tensor([1.0, 2.0, 3.0])
    alpha = weight * len(labels) / weight[labels].sum()
    expected = -(alpha[labels] * (1 - likely) ** 2 * likely.log()).sum()
    ours = loss_of(focal_gamma=2.0, class_weights=[1.0, 2.0, 3.0])(logits, labels)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradient(ours, logits), gradient(expected, logits))


def test_focal_loss_of_a_certain_sample_has_a_finite_gradient() -> None:
    logits = torch.tensor([[1e4, 0.0, 0.0]], requires_grad=True)
    loss = loss_of(focal_gamma=0.5)(logits, torch.tensor([0]))
    assert gradient(loss, logits).isfinite().all()


def test_weights_that_fit_no_class_are_refused_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        loss_of(class_weights={"cow": 1.0, "cat": 2.0, "horse": 2.0})
    assert [each.field.rpartition(".")[2] for each in caught.value.problems] == ["cow", "horse"]
    assert "known: bird, cat, dog" in str(caught.value)
    with pytest.raises(UserError, match="2 weights for 3 classes"):
        loss_of(class_weights=[1.0, 2.0])
    with pytest.raises(UserError, match="every class of the training data weighs 0"):
        ClassificationLoss(ClassLoss(class_weights={"a": 0.0}), ["a"], np.array([0]))
