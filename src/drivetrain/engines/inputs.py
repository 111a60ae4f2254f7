"""Moves batches to the device; to a GPU before they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drivetrain.config.precision import Precision
from drivetrain.data.loader import MicroBatch
from drivetrain.memory.transfers import Ahead, sent
from drivetrain.numerics.torch_precision import dtype
from drivetrain.workloads.base import Batch


class Inputs:
    """Moves batches; floating tensors take the dtype that the parameters have when they are used."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self._device = device
        self._dtype = dtype(precision.compute if precision.cast else precision.parameters)
        self._ahead = Ahead(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch on the device."""
        moved = None if self._ahead is None else self._ahead.take(batch)
        if moved is not None:
            return moved
        return {
            name: sent(t, self._device, self._dtype if t.is_floating_point() else None) for name, t in batch.items()
        }

    def expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Begins to send the first of them to a GPU."""
        if self._ahead is not None and micro_batches:
            self._ahead.send(micro_batches[0].tensors, self._dtype)
