"""Keeps what each part of an evaluation added to its metrics, so that runs on the same samples are compared in pairs.

The loss is kept batch by batch, as sum and count; right answers are kept sample by sample, where the workload has an
accuracy of one class a sample, and so are metrics that are the mean of a column of its predictions, such as the reward
accuracy of pairs. They stay on the device until they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from torch import Tensor

from drivetrain.runtime.atomic_file import replacing
from drivetrain.workloads.base import Outputs
from drivetrain.workloads.metrics import MeanOfColumn

ANSWERS = "answers."  # before the name of a metric that is a mean over answers: the score of each
MEANS = "means."  # before the name of a metric that is the mean of a column
# of each batch: "loss" (2,), "right" (counted samples,), "targets" (samples,), "means.<metric>" (samples, 2)
Parts = dict[str, list[np.ndarray]]


class SampleScores:
    """The scores of the batches that this rank evaluated, in their order. by_class: whether outputs may have one class
    number a sample, of which the accuracy is the share of right ones. ignored: the target of samples that the accuracy
    leaves out; they are neither right nor wrong. means: the metrics that are the mean of a column of the predictions,
    (samples, columns)."""

    def __init__(
        self, by_class: bool, ignored: int | None = None, means: Mapping[str, MeanOfColumn] = MappingProxyType({})
    ) -> None:
        self._by_class, self._ignored, self._means = by_class, ignored, means
        self._losses: list[Tensor] = []
        self._right: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._predictions: list[Tensor] = []

    def reset(self) -> None:
        for kept in (self._losses, self._right, self._targets, self._predictions):
            kept.clear()

    def add(self, terms: Tensor, outputs: Outputs) -> None:
        """Adds a batch. terms: sum and count of each term of its loss, (terms, 2); several make no single mean."""
        if len(terms) == 1:
            self._losses.append(terms[0])
        if self._by_class and outputs.targets.dim() == 1:
            self._right.append(outputs.predictions == outputs.targets)
            self._targets.append(outputs.targets)
        if self._means:
            self._predictions.append(outputs.predictions)

    def parts(self) -> Parts:
        """Returns the scores in CPU memory."""
        kept = {"loss": self._losses, "right": self._right, "targets": self._targets}
        found = {name: [each.cpu().numpy() for each in batches] for name, batches in kept.items() if batches}
        if self._ignored is not None and "right" in found:
            pairs = zip(found["right"], found["targets"], strict=True)
            found["right"] = [right[targets != self._ignored] for right, targets in pairs]
        for name, metric in self._means.items():
            if self._predictions:
                found[f"{MEANS}{name}"] = [metric.of_each(each).cpu().numpy() for each in self._predictions]
        return found


def in_order(dealt: Sequence[tuple[int, Parts]]) -> dict[str, np.ndarray]:
    """Returns the scores of all batches in the order of the data. dealt: (data rank, its parts) of each rank; batches
    went to the data ranks in turns, and ranks of one data rank have the same parts, or none.

    loss: (batches, 2), sum and count; right: (counted samples,), 0 or 1; targets: (samples,); means.<metric>: (samples,
    2), value and weight.
    """
    by_rank = {rank: parts for rank, parts in reversed(dealt) if parts}
    found = {}
    for name in dict.fromkeys(name for parts in by_rank.values() for name in parts):
        batches = _in_turns([by_rank[rank].get(name, []) for rank in sorted(by_rank)])
        if batches:
            found[name] = np.stack(batches) if name == "loss" else np.concatenate(batches)
    return found


def write_scores(scores: Mapping[str, np.ndarray], path: Path) -> None:
    """Writes scores in order; none if there are none. Raises OSError.

    In place of the targets stands `samples`, a digest of them, or of the counts of the batches or samples, which tells
    whether two runs were evaluated on the same.
    """
    if not scores:
        return
    kept = {name: values for name, values in scores.items() if name != "targets"}
    counted = next((values[:, 1] for name, values in scores.items() if name == "loss" or name.startswith(MEANS)), None)
    known = scores.get("targets", counted)
    if known is not None:
        kept["samples"] = np.array(hashlib.sha256(known.astype(np.int64).tobytes()).hexdigest())
    with replacing(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **kept)


def scores_of_answers(each: Mapping[str, Sequence[float]], references: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns scores as `write_scores` takes them. each: metric → (answers,), its score of each. references: those of
    the answers, kept as a digest."""
    if not each:
        return {}
    digest = hashlib.sha256(json.dumps(list(references)).encode()).hexdigest()
    arrays = {f"{ANSWERS}{name}": np.array(scores, dtype=np.float64) for name, scores in each.items()}
    return {**arrays, "references": np.array(digest)}


def _in_turns(by_rank: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """Returns the batches in the order of the data: the first of each rank, then the second, ..."""
    most = max(map(len, by_rank), default=0)
    return [batches[turn] for turn in range(most) for batches in by_rank if turn < len(batches)]
