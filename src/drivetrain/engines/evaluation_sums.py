"""The sums that an engine keeps over the batches of an evaluation: loss terms, metrics, and the scores of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from drivetrain.workloads.base import Outputs, Workload
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.sample_scores import SampleScores


class EvaluationSums:
    """The sums of one evaluation on this rank."""

    def __init__(
        self, workload: Workload, metrics: Mapping[str, Metric], scores: SampleScores | None, device: torch.device
    ) -> None:
        self._weights, self._metrics, self._scores = workload.terms, metrics, scores
        self._sums = torch.zeros(len(self._weights), 2, dtype=torch.float64, device=device)  # of each term, and count
        for metric in metrics.values():
            metric.reset()
            metric.to(device)
        if scores is not None:
            scores.reset()

    def add(self, outputs: Outputs) -> None:
        """Adds a batch."""
        batch = self._terms(outputs)
        self._sums += batch
        for metric in self._metrics.values():
            metric.update(outputs.predictions, outputs.targets)
        if self._scores is not None:
            self._scores.add(batch, outputs)

    def values(self, summed: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Returns the loss, of several terms each one as loss_<name>, and the metrics. Joins the ranks. summed: sums a
        tensor over them."""
        of_metrics = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        means = [total / max(1, count) for total, count in summed(self._sums).tolist()]
        weighted = sum(mean * weight for mean, weight in zip(means, self._weights.values(), strict=True))
        of_terms = {f"loss_{name}": mean for name, mean in zip(self._weights, means, strict=True)}
        return {"loss": weighted, **(of_terms if len(means) > 1 else {}), **of_metrics}

    def _terms(self, outputs: Outputs) -> Tensor:
        """Returns sum and count of each term of a batch, (terms, 2)."""
        terms = outputs.terms or {next(iter(self._weights)): (outputs.loss_sum, outputs.count)}
        batch = torch.zeros_like(self._sums)
        for number, name in enumerate(self._weights):
            batch[number, 0] += terms[name][0]
            batch[number, 1] += terms[name][1]
        return batch
