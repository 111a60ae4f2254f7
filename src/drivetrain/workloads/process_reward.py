"""Trains a process reward model on answers that are marked step by step: for each step, whether it is right.

The model is Transformers' token classifier of two labels, so that `AutoModelForTokenClassification` loads it, and a
step's label is of its last token (Uesato et al. 2022, "Solving math word problems with process- and outcome-based
feedback", section 2.4; Lightman et al. 2023, "Let's verify step by step"). The loss is the mean cross-entropy over the
steps of the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.data.language.samples import JoinedSamples, Sample, Steps, StepSamples
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.workloads.base import Batch, Outputs
from drivetrain.workloads.exporting import PlainBatch
from drivetrain.workloads.metrics import Accuracy, MacroF1, Metric
from drivetrain.workloads.reward_build import STEP_LABELS
from drivetrain.workloads.scoring import ScoringWorkload

RIGHT = STEP_LABELS.index("correct")


class ProcessRewardWorkload(ScoringWorkload):
    # --- batches ------------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Steps]) -> Batch:
        """Returns input_ids (B, T) int64, padded at the end; or, packed, one row of all (1, total), with position_ids
        that begin again with each. ends: (S,) int64, where the S steps of all samples have their last token, among all
        places; labels: (S,) int64; sample_of: (S,) int64, the sample that each step is of."""
        ids = [each.own[0].astype(np.int64) for each in samples]
        ends = [np.flatnonzero(each.own[1]) for each in samples]
        labels = [each.labels[places] for each, places in zip(samples, ends, strict=True)]
        lengths = [len(each) for each in ids]
        if self._packs:
            before = np.cumsum([0, *lengths[:-1]])
            given = {"input_ids": np.concatenate(ids)[None], "position_ids": _positions(lengths)[None]}
        else:
            before = max(lengths) * np.arange(len(ids))
            given = {"input_ids": self._padded(ids).numpy()}
        steps = {
            "ends": np.concatenate([places + start for places, start in zip(ends, before, strict=True)]),
            "labels": np.concatenate(labels).astype(np.int64),
            "sample_of": np.repeat(np.arange(len(ids)), [len(places) for places in ends]),
        }
        return {name: torch.from_numpy(each) for name, each in {**given, **steps}.items()}

    def shown(self, sample: Steps) -> str:
        """Returns its text, each step with whether it is right."""
        ids, ends = sample.own
        edges = [0, *(np.flatnonzero(ends) + 1).tolist()]
        pieces = [self._reader.tokenizer.decode(ids[a:b].tolist()) for a, b in pairwise(edges)]
        marks = ["right" if sample.labels[edge - 1] else "wrong" for edge in edges[1:]]
        return "\n".join(f"{mark}: {text}" for mark, text in zip(marks, pieces, strict=True))

    def sides(self, sample: Steps) -> Mapping[str, Sample]:
        return {"text": sample.own}

    def _lengths_of(self, samples: JoinedSamples | StreamedMixture) -> list[int] | None:
        if not isinstance(samples, JoinedSamples):
            return None
        return [int(n) for part in samples.parts if isinstance(part, StepSamples) for n in part.own.lengths]

    # --- the loss -----------------------------------------------------------------------------------------------------

    def count(self, batch: Batch) -> int:
        return len(batch["labels"])

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self._logits(model, batch), batch["labels"], reduction="sum")

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns (S, 2) fp32, of the last token of each step."""
        if self._packs:
            given = {name: batch[name] for name in ("input_ids", "position_ids", "ends")}
            return model(**given, **self._extra).logits.float()
        logits: Tensor = model(input_ids=batch["input_ids"], **self._extra).logits
        return logits.flatten(0, 1).index_select(0, batch["ends"]).float()

    # --- evaluation and prediction ------------------------------------------------------------------------------------

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        logits, labels = self._logits(model, batch), batch["labels"]
        return Outputs(F.cross_entropy(logits, labels, reduction="sum"), len(labels), logits.argmax(1), labels)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Returns for each sample how likely each of its steps is right, and the least of these."""
        right = self._logits(model, batch).softmax(1)[:, RIGHT]
        counts = torch.bincount(batch["sample_of"]).tolist()
        rows = [[round(value, 6) for value in part.tolist()] for part in right.split(counts)]
        return [{"steps": len(row), "step_scores": row, "lowest_step_score": min(row)} for row in rows]

    def metrics(self) -> Mapping[str, Metric]:
        """Returns step_accuracy: the share of steps whose likelier label is theirs; step_f1: the mean of both labels'
        F1, since most steps are right in most data."""
        return {"step_accuracy": Accuracy(), "step_f1": MacroF1(len(STEP_LABELS))}

    # --- files --------------------------------------------------------------------------------------------------------

    def plain_batch(self, model: nn.Module, samples: Sequence[Steps]) -> PlainBatch:
        del model
        return self._plain([each.own[0] for each in samples])


def _positions(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.arange(length) for length in lengths])
