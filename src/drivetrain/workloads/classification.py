"""What image and text classification share: loss, metrics and predictions over logits and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.workloads.base import BestMetric, Outputs
from drivetrain.workloads.metrics import Accuracy, MacroF1, Metric

BEST = BestMetric("accuracy", higher_is_better=True)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Scalar: summed over the batch, in fp32. logits: (B, classes); labels: (B,)."""
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


def classification_outputs(logits: Tensor, labels: Tensor) -> Outputs:
    return Outputs(cross_entropy_sum(logits, labels), labels.numel(), logits.argmax(-1), labels)


def classification_metrics(num_classes: int) -> Mapping[str, Metric]:
    """accuracy: share of samples that are right. macro_f1: mean of the classes' F1, each class counting the same."""
    return {"accuracy": Accuracy(), "macro_f1": MacroF1(num_classes)}


def classification_rows(logits: Tensor, class_names: Sequence[str]) -> list[dict[str, Any]]:
    probability, number = logits.float().softmax(-1).max(-1)
    pairs = zip(number.tolist(), probability.tolist(), strict=True)
    return [{"label": class_names[n], "probability": round(p, 6)} for n, p in pairs]
