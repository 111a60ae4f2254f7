"""Infers from outputs, targets and loss what a user's model predicts, and with it metrics and the form of
predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drivetrain.workloads.metrics import R2, Accuracy, MacroF1, MeanError, Metric
from drivetrain.workloads.user_loss import SummedLoss

MOST_NAMED = 100  # classes up to which a prediction has the probability of each


def task_of(output: Tensor, target: Tensor, loss: SummedLoss) -> Task:
    """Returns the task. output, target: of one batch, as model and data return them."""
    if loss.is_binary:
        return Binary(loss.takes_logits)
    if not target.is_floating_point() and output.dim() == target.dim() + 1:
        return Classes(output.shape[1], loss.ignored)
    if output.is_floating_point() and output.shape == target.shape:
        return Numbers()
    return Unknown()


class Task(ABC):
    @abstractmethod
    def metrics(self) -> Mapping[str, Metric]: ...

    @abstractmethod
    def compared(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the arguments of the metrics: predictions and targets."""

    @abstractmethod
    def predictions(self, output: Tensor) -> list[Any]:
        """Returns one JSON-able value a sample. output: (B, ...)."""


@dataclass(frozen=True)
class Classes(Task):
    """output: (B, classes, ...) logits or log-probabilities; target: (B, ...) class numbers."""

    num_classes: int
    ignored: int | None

    def metrics(self) -> Mapping[str, Metric]:
        return {"accuracy": Accuracy(self.ignored), "macro_f1": MacroF1(self.num_classes, self.ignored)}

    def compared(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return output.argmax(1), target

    def predictions(self, output: Tensor) -> list[Any]:
        """Returns the likeliest class; for a sample with a single one, the probability of each as well."""
        classes = output.argmax(1).tolist()
        if output.dim() != 2 or self.num_classes > MOST_NAMED:
            return list(classes)
        rows = zip(classes, output.float().softmax(1).tolist(), strict=True)  # of log-probabilities: themselves
        return [
            {
                "prediction": number,
                "probability": round(found[number], 6),
                "probabilities": {str(each): round(p, 6) for each, p in enumerate(found)},
            }
            for number, found in rows
        ]


@dataclass(frozen=True)
class Binary(Task):
    """Yes or no. output: (B, ...) scores; target: as many numbers from 0 to 1."""

    logits: bool

    def metrics(self) -> Mapping[str, Metric]:
        return {"accuracy": Accuracy()}

    def compared(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns one answer a sample, (B,), where each has a single one; those of several labels keep their shape."""
        yes, true = (output > (0.0 if self.logits else 0.5)).int(), (target > 0.5).int()
        return (yes.flatten(), true.flatten()) if target.dim() < 2 or target[0].numel() == 1 else (yes, true)

    def predictions(self, output: Tensor) -> list[Any]:
        return _rows(output.float().sigmoid() if self.logits else output)


@dataclass(frozen=True)
class Numbers(Task):
    """output and target: (B, ...) of one shape. r2 is over all numbers together."""

    def metrics(self) -> Mapping[str, Metric]:
        return {"mean_absolute_error": MeanError(1), "mean_squared_error": MeanError(2), "r2": R2()}

    def compared(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return output.float().flatten(), target.float().flatten()

    def predictions(self, output: Tensor) -> list[Any]:
        return _rows(output)


@dataclass(frozen=True)
class Unknown(Task):
    """An unknown task: no metric is safe but the loss."""

    def metrics(self) -> Mapping[str, Metric]:
        return {}

    def compared(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return output, target

    def predictions(self, output: Tensor) -> list[Any]:
        return _rows(output)


def _rows(output: Tensor) -> list[Any]:
    """Returns numbers if a sample has one, else lists."""
    output = output.float() if output.dim() else output.float()[None]  # a model may squeeze a batch of one
    return list((output.flatten() if output[0].numel() == 1 else output).tolist())
