"""The common part of image and text classification: loss, metrics and predictions over logits and labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from drivetrain.memory.transfers import on_host
from drivetrain.workloads.base import Batch, BestMetric, Outputs, Workload
from drivetrain.workloads.class_loss import ClassificationLoss
from drivetrain.workloads.metrics import Accuracy, MacroF1, Metric

CLASS_COUNTS = "class counts"
LARGEST_CLASS = "largest_class"  # of the evaluation data: its name and share, which always answering it gets right
MOST_NAMED = 100  # classes up to which a prediction has the probability of each


class Classifier(Workload):
    """A workload whose batches have "labels" (B,), and whose model returns logits (B, classes)."""

    _classes: Sequence[str]
    _loss: ClassificationLoss

    @abstractmethod
    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns (B, classes)."""

    def count(self, batch: Batch) -> int:
        """Counts the rows: those of a stream that are left out have a label below 0."""
        return int((on_host(batch["labels"]) >= 0).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(self._logits(model, batch), batch["labels"])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        logits, labels = self._logits(model, batch), batch["labels"]
        return Outputs(self._loss(logits, labels), self.count(batch), logits.argmax(-1), labels)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        return classification_rows(self._logits(model, batch), self._classes)

    def described(self, samples: Any, index: int) -> dict[str, Any]:
        """Returns the label in the data, if there is one."""
        label = -1 if samples.labels is None else int(samples.labels[index])
        return {"reference": self._classes[label]} if label >= 0 else {}

    def metrics(self) -> Mapping[str, Metric]:
        """Returns accuracy: share of samples that are right; macro_f1: mean of the classes' F1, each counting the
        same."""
        return {"accuracy": Accuracy(), "macro_f1": MacroF1(len(self._classes))}

    @property
    def best_metric(self) -> BestMetric:
        return BestMetric("accuracy", higher_is_better=True)

    @property
    def splits_batches(self) -> bool:
        return True

    @property
    def data_report(self) -> Mapping[str, Any]:
        """Returns the facts, and the counts of each class: {"class", "training", "evaluation"}."""
        training, held_out = (self._counts(samples) for samples in (self.train, self.evaluation))
        pairs = zip(self._classes, training, held_out, strict=True)
        counts = [{"class": name, "training": ours, "evaluation": theirs} for name, ours, theirs in pairs]
        return {**self.facts, CLASS_COUNTS: counts}

    def _largest_class(self) -> dict[str, Any]:
        """Returns the fact by which the report tells an accuracy that any constant answer has."""
        counts = self._counts(self.evaluation)
        most = int(np.argmax(counts))
        return {LARGEST_CLASS: {"class": self._classes[most], "share": counts[most] / max(1, sum(counts))}}

    def _counts(self, samples: Any) -> list[int]:
        counts: list[int] = np.bincount(samples.labels, minlength=len(self._classes)).tolist()
        return counts

    def _class_warnings(self) -> list[str]:
        """Returns warnings of an evaluation that lacks the samples to compare classes, or leaves some out."""
        counts = self._counts(self.evaluation)
        there = [name for name, count in zip(self._classes, counts, strict=True) if count]
        if len(there) == 1:
            return [f"all {sum(counts)} evaluation samples are of one class, {there[0]!r}: accuracy means nothing"]
        absent = [name for name, count in zip(self._classes, counts, strict=True) if not count]
        more = " ..." if len(absent) > 5 else ""
        shown = f"{', '.join(absent[:5])}{more}"
        return [f"{len(absent)} of {len(counts)} classes have no evaluation sample: {shown}"] if absent else []

    def _weighted(self) -> dict[str, Any]:
        """Returns the report's facts about weights by class, if there are any."""
        weights = self._loss.weights
        if weights is None:
            return {}
        return {"class_weights": {c: round(w, 6) for c, w in zip(self._classes, weights.tolist(), strict=True)}}


def classification_rows(logits: Tensor, class_names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns one row a sample: the likeliest class, its probability, and those of all classes if these are few."""
    probabilities = logits.float().softmax(-1)
    rows: list[dict[str, Any]] = []
    for number, found in zip(logits.argmax(-1).tolist(), probabilities.tolist(), strict=True):
        row: dict[str, Any] = {"label": class_names[number], "probability": round(found[number], 6)}
        if len(class_names) <= MOST_NAMED:
            row["probabilities"] = {name: round(p, 6) for name, p in zip(class_names, found, strict=True)}
        rows.append(row)
    return rows
