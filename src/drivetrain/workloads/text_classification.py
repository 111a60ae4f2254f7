"""Texts, or pairs of texts, into classes: any AutoModelForSequenceClassification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from drivetrain.config.workload import TextClassification, TextData
from drivetrain.data.split import evenly, stratified_split
from drivetrain.data.texts import Texts, class_names, encode, read_texts
from drivetrain.data.tokenised import Tokens, load_tokenizer, tokenise
from drivetrain.errors import problem
from drivetrain.models.transformers_classifiers import build_classifier, config_accepts
from drivetrain.workloads.base import Batch, BestMetric, NamedSamples, Outputs, Workload
from drivetrain.workloads.classification import (
    BEST,
    classification_metrics,
    classification_outputs,
    classification_rows,
    cross_entropy_sum,
)


class TextSamples:
    """Tokenised texts; a sample is (ids, segments or None, label or -1)."""

    def __init__(self, tokens: Tokens, labels: np.ndarray | None, names: Sequence[str]) -> None:
        self.tokens, self.labels, self.names = tokens, labels, names

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int, epoch: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        del epoch  # nothing here is random
        part = slice(self.tokens.offsets[index], self.tokens.offsets[index + 1])
        segments = None if self.tokens.segments is None else self.tokens.segments[part]
        return self.tokens.ids[part], segments, -1 if self.labels is None else int(self.labels[index])


class TextClassificationWorkload(Workload):
    train: TextSamples
    evaluation: TextSamples

    def __init__(self, config: TextClassification, seed: int) -> None:
        self._config, self._seed = config, seed
        self._warnings: list[str] = []
        tokenizer = config.model.tokenizer or config.model.path
        assert tokenizer is not None, "rules.check lets no run without a tokenizer pass"
        self._tokenizer = load_tokenizer(tokenizer, "workload.model.tokenizer")
        # a tokenizer without a padding token (GPT-2's) pads with the end of text; the mask hides it either way
        self._pad = next((n for n in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id) if n is not None), 0)
        train, evaluation = self._read(config.data)
        self._classes = class_names(train.labels.tolist(), "workload.data.label_column")
        self.train = self._samples(train, "train")
        self.evaluation = self._samples(evaluation, "evaluation")
        self._model_config = self._completed_model_config()

    def _read(self, data: TextData) -> tuple[Texts, Texts]:
        train = read_texts(data, data.train, "workload.data.train")
        self._dropped = train.without_text
        if data.evaluation is not None:
            evaluation = read_texts(data, data.evaluation, "workload.data.evaluation", split="test")
            self._dropped += evaluation.without_text
        else:
            _, numbers = np.unique(train.labels.astype(str), return_inverse=True)
            parts = stratified_split(numbers, data.evaluation_fraction, self._seed, "workload.data.train")
            train, evaluation = train.take(parts[0]), train.take(parts[1])
        if self._dropped:
            self._warnings.append(f"{self._dropped} row{'s' * (self._dropped > 1)} without text dropped")
        return self._limited(train, data.limit_train), self._limited(evaluation, data.limit_evaluation)

    def _limited(self, texts: Texts, limit: int | None) -> Texts:
        if limit is None:
            return texts
        _, numbers = np.unique(texts.labels.astype(str), return_inverse=True)
        return texts.take(evenly(numbers, limit, self._seed))

    def _samples(self, texts: Texts, name: str) -> TextSamples:
        given = getattr(self._config.data, name) or self._config.data.train
        labels = encode(texts.labels, self._classes, given, f"workload.data.{name}")
        return TextSamples(self._tokens(texts), labels, [f"row {row}" for row in texts.rows])

    def _tokens(self, texts: Texts) -> Tokens:
        data = self._config.data
        tokens, warning = tokenise(self._tokenizer, texts.first, texts.second, data.max_length, data.cache)
        if warning:
            self._warnings.append(warning)
        return tokens

    def _completed_model_config(self) -> dict[str, Any] | None:
        """The run file's model config, with what follows from the tokenizer where it is left out."""
        given, size = self._config.model.config, len(self._tokenizer)
        if given is None:
            return None
        if given.get("vocab_size", size) < size:
            raise problem(
                "workload.model.config.vocab_size",
                f"vocab_size ({given['vocab_size']}) < the tokenizer's tokens ({size})",
                "leave it out: it is taken from the tokenizer",
            )
        places = given.get("max_position_embeddings")
        if places is not None and places < self._config.data.max_length:
            raise problem(
                "workload.data.max_length",
                f"max_length ({self._config.data.max_length}) > max_position_embeddings ({places})",
                "shorten the texts or give the model more positions",
            )
        derived = {"vocab_size": size, "pad_token_id": self._pad}
        return {**{key: value for key, value in derived.items() if config_accepts(given, key)}, **given}

    def build_model(self) -> nn.Module:
        model = self._config.model
        return build_classifier(
            "AutoModelForSequenceClassification", model.path, self._model_config, self._classes, "workload.model"
        )

    def collate(self, samples: Sequence[Any]) -> Batch:
        """input_ids, attention_mask, labels, and token_type_ids for pairs: (B, L) and (B,), int64."""
        data = self._config.data
        longest = data.max_length if data.padding == "fixed" else max(len(ids) for ids, _, _ in samples)
        ids = np.full((len(samples), longest), self._pad, dtype=np.int64)
        mask = np.zeros((len(samples), longest), dtype=np.int64)
        segments = np.zeros((len(samples), longest), dtype=np.int64)
        for row, (tokens, kinds, _) in enumerate(samples):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
            if kinds is not None:
                segments[row, : len(tokens)] = kinds
        batch = {"input_ids": ids, "attention_mask": mask, "labels": np.array([label for *_, label in samples])}
        if samples[0][1] is not None:
            batch["token_type_ids"] = segments
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def count(self, batch: Batch) -> int:
        return batch["labels"].numel()

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy_sum(_logits(model, batch), batch["labels"])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return classification_outputs(_logits(model, batch), batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        return classification_rows(_logits(model, batch), self._classes)

    def metrics(self) -> Mapping[str, Metric]:
        return classification_metrics(len(self._classes))

    @property
    def best_metric(self) -> BestMetric:
        return BEST

    @property
    def splits_batches(self) -> bool:
        return True

    @property
    def lengths(self) -> Sequence[int] | None:
        data = self._config.data
        grouped = data.group_by_length and data.padding == "dynamic"
        return self.train.tokens.lengths.tolist() if grouped else None

    @property
    def facts(self) -> dict[str, Any]:
        tokens = self.train.tokens
        return {
            "train_samples": len(self.train),
            "evaluation_samples": len(self.evaluation),
            "classes": len(self._classes),
            "rows_without_text": self._dropped,
            "truncated": round(tokens.truncated / len(self.train), 4),
            "mean_tokens": round(float(tokens.lengths.mean()), 1),
        }

    @property
    def warnings(self) -> Sequence[str]:
        return self._warnings

    def prediction_samples(self, path: str | None) -> NamedSamples:
        if path is None:
            return self.evaluation
        texts = read_texts(self._config.data, path, "--data", labelled=False)
        return TextSamples(self._tokens(texts), None, [f"row {row}" for row in texts.rows])

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        self._tokenizer.save_pretrained(folder)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs).logits
    return logits
