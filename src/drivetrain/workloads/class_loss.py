"""The loss of a classifier: cross-entropy, weighted by class, smoothed, or focused on hard samples.

Each sample's loss is divided by the number of samples of the global batch and by nothing else, so that neither
micro-batches nor ranks change it. Weights by class are therefore scaled once, to a mean of 1 over the training samples;
PyTorch's nn.CrossEntropyLoss(weight=...) divides by the weights of the batch's own samples instead, which comes to the
same over the whole data set, but not in each part of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from drivetrain.config.workload import ClassLoss
from drivetrain.errors import Problem, UserError

LEAST = 1e-6  # 1 - probability below which focal loss has no slope: that of a power below 1 is infinite at 0
FIELD = "workload.loss.class_weights"


class ClassificationLoss:
    """Sums the losses of a batch's samples."""

    def __init__(self, config: ClassLoss, classes: Sequence[str], labels: np.ndarray) -> None:
        """labels: class numbers of the training samples, (N,). Raises UserError for weights that fit no class."""
        self._smoothing, self._gamma = config.label_smoothing, config.focal_gamma
        self.weights = None if config.class_weights is None else _weights(config.class_weights, classes, labels)
        self._on: dict[torch.device, Tensor] = {}

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns a scalar, in fp32. logits: (B, classes); labels: (B,) class numbers, or -100 for samples that do not
        count."""
        weights = self._weights_on(logits.device)
        if not self._gamma:
            return functional.cross_entropy(
                logits.float(), labels, weights, reduction="sum", label_smoothing=self._smoothing
            )
        # Lin et al., "Focal Loss for Dense Object Detection" (2017), equation 5
        losses = functional.cross_entropy(logits.float(), labels, reduction="none")
        losses = losses * (1 - (-losses).exp()).clamp(min=LEAST).pow(self._gamma)
        return (losses if weights is None else losses * weights[labels.clamp(min=0)]).sum()

    def _weights_on(self, device: torch.device) -> Tensor | None:
        if self.weights is None:
            return None
        if device not in self._on:
            self._on[device] = self.weights.to(device)
        return self._on[device]


Given = str | Sequence[float] | dict[str | int, float]


def _weights(given: Given, classes: Sequence[str], labels: np.ndarray) -> Tensor:
    """Returns one weight a class, fp32 (classes,), with a mean of 1 over the training samples."""
    counts = np.bincount(labels, minlength=len(classes))
    if given == "balanced":  # as scikit-learn's
        raw = len(labels) / (len(classes) * np.maximum(counts, 1))
    else:
        if problems := list(_problems(given, classes)):
            raise UserError(problems)
        by_name = {str(name): weight for name, weight in given.items()} if isinstance(given, dict) else None
        raw = np.array(given if by_name is None else [by_name.get(name, 1.0) for name in classes], dtype=np.float64)
    total = float((raw * counts).sum())
    if not total > 0:
        raise UserError([Problem(FIELD, "every class of the training data weighs 0", "give one of them more")])
    return torch.tensor(raw * (len(labels) / total), dtype=torch.float32)


def _problems(given: Given, classes: Sequence[str]) -> Iterator[Problem]:
    listed = ", ".join(classes[:20])
    if isinstance(given, dict):
        for name in given:
            if str(name) not in classes:
                yield Problem(f"{FIELD}.{name}", "the training data have no such class", f"known: {listed}")
    elif len(given) != len(classes):
        why = f"{len(given)} weights for {len(classes)} classes"
        yield Problem(FIELD, why, f"give one for each, in this order: {listed}; or name them, {{{classes[0]}: 2.0}}")
