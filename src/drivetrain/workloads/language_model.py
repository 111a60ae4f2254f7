"""Trains language models on the next token of texts, or on the replies of conversations. Any AutoModelForCausalLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.generation import Generation
from drivetrain.config.language import LanguageModel
from drivetrain.data.language.chat import show
from drivetrain.memory.transfers import on_host
from drivetrain.models.language_options import context_length, generation_config
from drivetrain.models.model_folders import save_description
from drivetrain.workloads.base import Batch, BestMetric, Outputs, Samples
from drivetrain.workloads.exporting import Dialogue, PlainBatch
from drivetrain.workloads.generating import Generates, Prompt
from drivetrain.workloads.language_build import build_language_model, inputs_of
from drivetrain.workloads.language_prompt_files import prompts_in
from drivetrain.workloads.language_prompts import (
    behind,
    dialogues_of,
    ends_of,
    own_prompt,
    prompts_of,
    prompts_of_samples,
)
from drivetrain.workloads.language_workload import IGNORED, NAMES, LanguageSamplesWorkload
from drivetrain.workloads.metrics import Accuracy, Metric


class LanguageModelWorkload(LanguageSamplesWorkload, Generates):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self._prompts = prompts_of(config, self._reader, self.evaluation)
        self._ends, self._seed = ends_of(self._reader), seed
        self._places: int | None = None  # until a model is built

    def build_model(self) -> nn.Module:
        parts = self.adapters, self.fake_quantiser
        built = build_language_model(self._config, self._reader, self._packs, *parts)
        self._head, self._packs = built.head, built.packed is not None
        if built.packed is not None:
            built.packed.rows = lambda: self.rows
        self._places = context_length(built.model.config)
        for note in built.notes:
            self._reader.warn(note)
        self._inputs = inputs_of(built)
        return built.model

    # --- batches -----------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Any]) -> Batch:
        return self._laid_out(samples)

    @property
    def by_position(self) -> Mapping[str, int | None]:
        """Returns no tensors for packed rows: positions that began again would be another sequence to Transformers
        too."""
        return dict(zip(NAMES, (0, None, IGNORED), strict=True))

    def shown(self, sample: Any) -> str:
        """Returns its text, with the trained parts between brackets."""
        ids, targets = sample
        pieces = show(ids, targets, self._reader.tokenizer)
        return "".join(f"⟦{text}⟧" if trained else text for text, trained in pieces)

    def count(self, batch: Batch) -> int:
        return int((on_host(batch["targets"]) != IGNORED).sum())

    def tokens(self, batch: Batch) -> int:
        """Counts the places of each row up to its last target: behind it there is padding."""
        trained = batch["targets"] != IGNORED
        return int((trained * torch.arange(1, trained.shape[1] + 1)).amax(1).sum())

    def _given(self, batch: Batch) -> dict[str, Any]:
        return self._inputs.of(batch)

    # --- loss and metrics --------------------------------------------------------------------------------------------

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._head.loss_sum(model, self._given(batch), batch["targets"])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        targets = batch["targets"]
        losses, likeliest = self._head.losses_and_argmax(model, self._given(batch), targets)
        count = self.count(batch)
        if not count:  # of a stream's rows that are left out; metrics take no empty tensors
            nothing = targets.new_full((1,), IGNORED)
            return Outputs(losses.sum(), 0, nothing, nothing)
        return Outputs(losses.sum(), count, likeliest, targets[targets != IGNORED])

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Returns each sample's loss and number of targets; for a batch that `batch_of` made, the logits behind it."""
        targets = batch["targets"]
        if "behind" in batch:
            return [{"logits": row.cpu()} for row in self._head.logits_at_targets(model, self._given(batch), targets)]
        losses, _ = self._head.losses_and_argmax(model, self._given(batch), targets)
        sample_of = self._sample_of(batch)
        rows, samples = sample_of[targets != IGNORED], int(sample_of.max()) + 1
        counts = torch.bincount(rows, minlength=samples)
        sums = torch.zeros(samples, dtype=torch.float64, device=losses.device).index_add_(0, rows, losses.double())
        pairs = zip((sums / counts.clamp(min=1)).tolist(), counts.tolist(), strict=True)
        return [{"loss": round(loss, 6), "tokens": count} for loss, count in pairs]

    def _sample_of(self, batch: Batch) -> Tensor:
        """Returns the number of the sample at each place, (B, T)."""
        if self._packs:
            positions = batch["position_ids"]
            goes_on = positions[:, 1:] == positions[:, :-1] + 1
            return F.pad((~goes_on).cumsum(1), (1, 0))
        rows = torch.arange(len(batch["targets"]), device=batch["targets"].device)
        return rows[:, None].expand_as(batch["targets"])

    def metrics(self) -> Mapping[str, Metric]:
        """Returns token_accuracy: share of targets that are the likeliest token."""
        return {"token_accuracy": Accuracy(IGNORED)}

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns perplexity: exp of the loss per target."""
        return {"perplexity": math.exp(min(values["loss"], 700.0))}

    @property
    def best_metric(self) -> BestMetric:
        return BestMetric("loss", higher_is_better=False)

    # --- prompts answered --------------------------------------------------------------------------------------------

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    @property
    def answers_samples(self) -> bool:
        """Returns whether samples are conversations; texts are their own continuation."""
        return self._config.generate is not None and self._config.has_conversations

    def prompts_for(self, samples: Samples, numbers: Iterable[int]) -> Mapping[int, Prompt]:
        return prompts_of_samples(samples, numbers, self._reader.tokenizer)

    def prompts_of(self, texts: Sequence[str]) -> Sequence[Prompt]:
        return [own_prompt(text, self._reader, self._config, "--text") for text in texts]

    def prompts_in(self, path: str) -> Sequence[Prompt] | None:
        return prompts_in(path, self._reader, self._config)

    @property
    def settings(self) -> Generation:
        return self._config.generate or Generation()

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def ends(self) -> frozenset[int]:
        return self._ends

    @property
    def places(self) -> int | None:
        return self._places

    def decoded(self, ids: Sequence[int]) -> str:
        return str(self._reader.tokenizer.decode(list(ids), skip_special_tokens=True))

    def batch_of(self, sequences: Sequence[Sequence[int]]) -> Batch:
        rows, self.rows = self.rows, None  # they grow with each token
        batch = self._laid_out(behind(sequences))
        self.rows = rows
        return {**batch, "behind": torch.ones(len(sequences), dtype=torch.bool)}

    # --- its plain form, for other software ------------------------------------------------------------------------

    def plain_batch(self, model: nn.Module, samples: Sequence[Any]) -> PlainBatch:
        del model
        [(ids, trained)] = samples  # each by itself: generating software pads in its own way
        targets = np.where(trained[1:], ids[1:], IGNORED)
        tokens, labels = (torch.from_numpy(each.astype(np.int64))[None] for each in (ids[:-1], targets))
        return PlainBatch({"input_ids": tokens}, labels)

    def dialogues(self, count: int) -> list[Dialogue]:
        return dialogues_of(self._reader, count)

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        save_description(model, folder)
        generation_config(model, self._ends, self._reader.tokenizer).save_pretrained(folder)
        self._reader.tokenizer.save_pretrained(folder)
