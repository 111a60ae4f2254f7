"""Metrics of an evaluation: sums that add up over batches and ranks, so that a ragged batch counts by its samples.

These few are ours because torchmetrics takes longer to import than PyTorch (2 to 4 s, by SciPy, Matplotlib and
Transformers), on each rank, at each start and restart. An engine takes metrics of torchmetrics as well, and a user's
own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Metric(Protocol):
    """The interface that an engine needs of a metric."""

    higher_is_better: bool | None
    process_group: Any
    distributed_available_fn: Callable[[], bool]

    def reset(self) -> None: ...

    def to(self, device: torch.device, /) -> Any: ...

    def update(self, predictions: Tensor, targets: Tensor, /) -> None:
        """Adds one batch on one rank."""

    def compute(self) -> Any:
        """Returns the value over all batches of the ranks in `process_group` (None: all there are)."""


class Summed(ABC):
    """A metric that follows from sums over samples."""

    higher_is_better: bool | None = True

    def __init__(self, sums: int) -> None:
        self._sums = torch.zeros(sums, dtype=torch.float64)
        self.process_group: Any = None
        self.distributed_available_fn: Callable[[], bool] = dist.is_initialized

    def reset(self) -> None:
        self._sums.zero_()

    def to(self, device: torch.device) -> Summed:
        self._sums = self._sums.to(device)
        return self

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self._sums += self._summed(predictions, targets)

    def compute(self) -> Tensor:
        sums = self._sums.clone()
        if self.distributed_available_fn():
            dist.all_reduce(sums, group=self.process_group)
        return self._value(sums)

    @abstractmethod
    def _summed(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Returns the sums of one batch, (sums,) float64."""

    @abstractmethod
    def _value(self, sums: Tensor) -> Tensor: ...


class Accuracy(Summed):
    """Share of correct class numbers, without targets that are `ignored`."""

    def __init__(self, ignored: int | None = None) -> None:
        super().__init__(2)
        self.ignored = ignored

    def _summed(self, predictions: Tensor, targets: Tensor) -> Tensor:
        right = predictions == targets
        if self.ignored is None:
            return torch.stack([right.sum(), right.new_full((), right.numel(), dtype=torch.int64)]).double()
        counted = targets != self.ignored
        return torch.stack([(right & counted).sum(), counted.sum()]).double()

    def _value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1].clamp(min=1)


class MeanOfColumn(Summed):
    """Mean over samples of one column of the predictions, (B, columns). weight: the column that counts samples; None:
    each counts. by_sample: False where rows are tokens, which do not vary by themselves."""

    def __init__(
        self, column: int, higher_is_better: bool | None, weight: int | None = None, by_sample: bool = True
    ) -> None:
        super().__init__(2)
        self.by_sample = by_sample
        self._column, self._weight, self.higher_is_better = column, weight, higher_is_better

    def of_each(self, predictions: Tensor) -> Tensor:
        """Returns each sample's value and weight, (B, 2) float64."""
        values = predictions[:, self._column].double()
        counted = torch.ones_like(values) if self._weight is None else predictions[:, self._weight].double()
        return torch.stack([values, counted], 1)

    def _summed(self, predictions: Tensor, targets: Tensor) -> Tensor:
        del targets
        return self.of_each(predictions).sum(0)

    def _value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1].clamp(min=1)


class MacroF1(Summed):
    """Mean of the classes' F1, each class counting the same; a class that is neither target nor prediction does not
    count."""

    def __init__(self, num_classes: int, ignored: int | None = None) -> None:
        super().__init__(3 * num_classes)
        self._num_classes, self._ignored = num_classes, ignored

    def _summed(self, predictions: Tensor, targets: Tensor) -> Tensor:
        predictions, targets = predictions.flatten(), targets.flatten()
        if self._ignored is not None:
            counted = targets != self._ignored
            predictions, targets = predictions[counted], targets[counted]
        kinds = (targets[predictions == targets], predictions, targets)
        return torch.cat([torch.bincount(kind, minlength=self._num_classes) for kind in kinds]).double()

    def _value(self, sums: Tensor) -> Tensor:
        right, predicted, there = sums.view(3, self._num_classes)
        both = predicted + there  # F1 = 2 right / (predicted + there)
        return (2 * right / both.clamp(min=1)).sum() / (both > 0).sum().clamp(min=1)


class MeanError(Summed):
    """Mean of |prediction - target| to a power: 1, the absolute error; 2, the squared."""

    higher_is_better = False

    def __init__(self, power: int) -> None:
        super().__init__(2)
        self._power = power

    def _summed(self, predictions: Tensor, targets: Tensor) -> Tensor:
        error = (predictions.double() - targets.double()).abs().pow(self._power)
        return torch.stack([error.sum(), error.new_full((), error.numel())])

    def _value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1].clamp(min=1)


class R2(Summed):
    """1 - squared error / variance of the targets; 0 if the targets are all the same but not predicted exactly."""

    def __init__(self) -> None:
        super().__init__(4)

    def _summed(self, predictions: Tensor, targets: Tensor) -> Tensor:
        predictions, targets = predictions.double(), targets.double()
        error = (predictions - targets).square().sum()
        return torch.stack([error, targets.square().sum(), targets.sum(), error.new_full((), targets.numel())])

    def _value(self, sums: Tensor) -> Tensor:
        error, squares, total, count = sums
        spread = squares - total.square() / count.clamp(min=1)
        if spread > 1e-12 * squares:  # more than rounding
            return 1 - error / spread
        return (error == 0).double()
