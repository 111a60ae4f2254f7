"""Forward passes over one module: evaluation, prediction, and passes of a training step that need no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from drivetrain.data.loader import MicroBatch
from drivetrain.engines.base import EngineOptions
from drivetrain.engines.evaluation_sums import EvaluationSums
from drivetrain.engines.inputs import Inputs
from drivetrain.engines.model_holder import ModelHolder
from drivetrain.engines.weight_copies import WeightCopies
from drivetrain.numerics.torch_precision import autocast
from drivetrain.workloads.base import Batch
from drivetrain.workloads.loss_contract import LossContext
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.sample_scores import SampleScores

T = TypeVar("T")


class InferenceEngine(ModelHolder):
    """Runs the model forward, on batches that it puts on the device."""

    _options: EngineOptions
    _device: torch.device
    _inputs: Inputs
    _forward: nn.Module  # the wrapped model
    _weight_copies: WeightCopies

    @property
    def _inference(self) -> nn.Module:
        """Returns the module that runs forward in evaluation and prediction."""
        return self._forward

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[MicroBatch], metrics: Mapping[str, Metric], scores: SampleScores | None = None
    ) -> dict[str, float]:
        self._ready_for_inference()
        sums = EvaluationSums(self._workload, metrics, scores, self._device)
        context = LossContext(self._auxiliary.callables)
        with self._weight_copies.in_place(self._weight_copies.made()):
            for batch in batches:
                with autocast(self._options.precision, self._device):
                    outputs = self._workload.outputs_in(self._inference, self._to_device(batch.tensors), context)
                if batch.counts:
                    sums.add(outputs)
        return sums.values(self._ranks.sum)

    @torch.no_grad()
    def predict(self, batches: Iterable[MicroBatch]) -> Iterator[dict[str, Any]]:
        self._ready_for_inference()
        copies = self._weight_copies.made()
        for batch in batches:  # a yield outside of the block: what takes the rows may look at the weights
            with self._weight_copies.in_place(copies), autocast(self._options.precision, self._device):
                rows = self._workload.predict(self._inference, self._to_device(batch.tensors))
            for dealt in self._ranks.gather(rows if batch.counts else []) or ():
                yield from dealt

    @torch.no_grad()
    def without_gradient(self, micro_batches: Sequence[MicroBatch], work: Callable[[nn.Module, Batch], T]) -> list[T]:
        was_training = self._model.training
        self._model.eval()
        copies = self._weight_copies.made()
        found = []
        for batch in micro_batches:
            with self._weight_copies.in_place(copies):
                found.append(self._through(batch, work))
        self._model.train(was_training)
        return found

    def _through(self, batch: MicroBatch, work: Callable[[nn.Module, Batch], T]) -> T:
        """Returns the result of `work` on the model and a batch."""
        with autocast(self._options.precision, self._device):
            return work(self._inference, self._to_device(batch.tensors))

    def _ready_for_inference(self) -> None:
        """Replaces buffers that training fills on each rank alone (BatchNorm's statistics) by the first rank's."""
        self._ranks.copy_from_first(self._model.buffers())
        self._model.eval()

    def _to_device(self, batch: Batch) -> Batch:
        return self._inputs(batch)

    def expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._inputs.expect(micro_batches)
