"""The next token of plain text: any AutoModelForCausalLM."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from drivetrain.config.workload import LanguageModel
from drivetrain.data.plain_text import BYTES, TextWindows, read_ids
from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import problem
from drivetrain.models.transformers_classifiers import build_classifier, config_accepts
from drivetrain.workloads.base import Batch, BestMetric, NamedSamples, Outputs, Workload

IGNORED = -100


class LanguageModelWorkload(Workload):
    train: TextWindows
    evaluation: TextWindows

    def __init__(self, config: LanguageModel, seed: int) -> None:
        del seed  # windows are cut, not drawn
        self._config = config
        self._warnings: list[str] = []
        given = config.model.tokenizer
        self._tokenizer = None if given == "bytes" else load_tokenizer(given, "workload.model.tokenizer")
        data = config.data
        ids = self._ids(data.train, "workload.data.train")
        if data.evaluation is None:
            kept = len(ids) - round(len(ids) * data.evaluation_fraction)
            ids, held_out = ids[:kept], ids[kept:]
        else:
            held_out = self._ids(data.evaluation, "workload.data.evaluation")
        self.train = self._windows(ids, data.train, "workload.data.train")
        self.evaluation = self._windows(held_out, data.evaluation or data.train, "workload.data.evaluation")

    def _ids(self, path: str, field: str) -> np.ndarray:
        return read_ids(Path(path).expanduser(), self._tokenizer, field)

    def _windows(self, ids: np.ndarray, path: str, field: str) -> TextWindows:
        windows = TextWindows(ids, self._config.data.length, Path(path).name)
        if not len(windows):
            raise problem(field, f"{path} has {len(ids)} tokens for it, and two are the least", "give a longer text")
        return windows

    @property
    def _vocabulary(self) -> int:
        return BYTES if self._tokenizer is None else len(self._tokenizer)

    def build_model(self) -> nn.Module:
        model = self._config.model
        config = model.config
        if config is not None and config_accepts(config, "vocab_size"):
            config = {"vocab_size": self._vocabulary, **config}
        built = build_classifier(
            "AutoModelForCausalLM", model.path, config, (), "workload.model", self._warnings.append
        )
        known = built.get_input_embeddings().num_embeddings  # type: ignore[operator]
        if known < self._vocabulary:
            why = f"vocab_size ({known}) < the tokenizer's tokens ({self._vocabulary})"
            raise problem("workload.model", why, "leave vocab_size out, or give the model's own tokenizer")
        accepted = inspect.signature(built.forward).parameters
        self._inputs = {"input_ids", "position_ids"} & accepted.keys()
        self._extra = {"use_cache": False} if "use_cache" in accepted else {}
        return built

    def collate(self, samples: Sequence[np.ndarray]) -> Batch:
        """input_ids, position_ids, targets: (B, T), int64. Windows cut short are padded, without targets."""
        length = max(len(ids) for ids in samples) - 1
        inputs = np.zeros((len(samples), length), dtype=np.int64)
        targets = np.full((len(samples), length), IGNORED, dtype=np.int64)
        for row, ids in enumerate(samples):
            inputs[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
        positions = np.broadcast_to(np.arange(length), inputs.shape).copy()
        return {k: torch.from_numpy(v) for k, v in zip(self.by_position, (inputs, positions, targets), strict=True)}

    @property
    def by_position(self) -> Mapping[str, int]:
        return {"input_ids": 0, "position_ids": 0, "targets": IGNORED}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """(B, T, vocabulary)."""
        logits: Tensor = model(**{name: batch[name] for name in self._inputs}, **self._extra).logits
        return logits

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return _cross_entropy(self._logits(model, batch), batch["targets"])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        logits = self._logits(model, batch)
        loss = _cross_entropy(logits, batch["targets"])
        return Outputs(loss, self.count(batch), logits.argmax(-1), batch["targets"])

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Of each window its loss and its tokens."""
        logits, targets = self._logits(model, batch).float(), batch["targets"]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        counts = (targets != IGNORED).sum(1)
        pairs = zip((losses.sum(1) / counts).tolist(), counts.tolist(), strict=True)
        return [{"loss": round(loss, 6), "tokens": count} for loss, count in pairs]

    def metrics(self) -> Mapping[str, Metric]:
        """token_accuracy: share of tokens that are the likeliest."""
        accuracy = MulticlassAccuracy(self._vocabulary, average="micro", ignore_index=IGNORED, validate_args=False)
        return {"token_accuracy": accuracy}

    @property
    def best_metric(self) -> BestMetric:
        return BestMetric("loss", higher_is_better=False)

    @property
    def splits_batches(self) -> bool:
        return True

    @property
    def lengths(self) -> Sequence[int] | None:
        return None

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "train_samples": len(self.train),
            "evaluation_samples": len(self.evaluation),
            "length": self._config.data.length,
            "vocabulary": self._vocabulary,
        }

    @property
    def warnings(self) -> Sequence[str]:
        return self._warnings

    def prediction_samples(self, path: str | None) -> NamedSamples:
        return self.evaluation if path is None else self._windows(self._ids(path, "--data"), path, "--data")

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
