"""The common part of stages that train a model to score answers: its head, its padding and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.language import LanguageModel
from drivetrain.models.model_folders import save_description
from drivetrain.workloads.base import Batch, BestMetric
from drivetrain.workloads.exporting import PlainBatch
from drivetrain.workloads.language_workload import LanguageSamplesWorkload
from drivetrain.workloads.reward_build import build_reward_model, padding_of


class ScoringWorkload(LanguageSamplesWorkload):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self._pad = padding_of(self._reader.tokenizer)

    def build_model(self) -> nn.Module:
        parts = self.adapters, self.fake_quantiser
        built = build_reward_model(self._config, self._reader, self._pad, self._packs, *parts)
        self._packs = built.packed is not None
        for note in built.notes:
            self._reader.warn(note)
        self._extra = built.extra
        return built.model

    def _padded(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Returns the token ids of all rows, (B, T) int64, padded at the end."""
        table = np.full((len(rows), max(map(len, rows))), self._pad, dtype=np.int64)
        for number, ids in enumerate(rows):
            table[number, : len(ids)] = ids
        return torch.from_numpy(table)

    def tokens(self, batch: Batch) -> int:
        return int((batch["input_ids"] != self._pad).sum())

    def _plain(self, rows: Sequence[np.ndarray]) -> PlainBatch:
        """Returns the rows as Transformers' own models take them."""
        ids = self._padded(rows)
        places = torch.arange(ids.shape[1])
        mask = (places < torch.tensor([[len(row)] for row in rows])).long()
        return PlainBatch({"input_ids": ids, "attention_mask": mask}, None)

    @property
    def best_metric(self) -> BestMetric:
        return BestMetric("loss", higher_is_better=False)

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        save_description(model, folder)
        self._reader.tokenizer.save_pretrained(folder)
