"""Trains language models on the next token of texts, or on the replies of conversations. Any AutoModelForCausalLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.language import Generation, LanguageModel
from drivetrain.data.language.chat import show
from drivetrain.data.language.samples import JoinedSamples, Sample, TokenSamples
from drivetrain.data.mixed_order import mixed_order
from drivetrain.data.order import Order
from drivetrain.data.streams.endless import known_length
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.errors import problem
from drivetrain.memory.transfers import on_host
from drivetrain.models.language_options import context_length, generation_config
from drivetrain.models.model_folders import save_description
from drivetrain.workloads.base import Batch, BestMetric, NamedSamples, Outputs, Samples
from drivetrain.workloads.exporting import Dialogue, PlainBatch, Speaks
from drivetrain.workloads.generating import Generates, Prompt
from drivetrain.workloads.language_build import build_language_model
from drivetrain.workloads.language_data import LanguageReader
from drivetrain.workloads.language_mix import distinct
from drivetrain.workloads.language_prompts import Continuation, dialogues_of, prompts_of, prompts_of_samples
from drivetrain.workloads.language_report import data_report
from drivetrain.workloads.metrics import Accuracy, Metric

IGNORED = -100


class LanguageModelWorkload(Speaks, Generates):
    train: JoinedSamples | StreamedMixture
    evaluation: JoinedSamples | None

    def __init__(self, config: LanguageModel, seed: int) -> None:
        self._config, self._reader = config, LanguageReader(config, seed)
        found = self._reader.read()
        self.train, self.evaluation, self._mix = found.train, found.evaluation, found.mix
        self._prompts = prompts_of(config, self._reader, self.evaluation)
        self._continuation = Continuation(config.generate or Generation(), self._reader, seed)
        self._packs = config.is_packed  # until a model is built that cannot

    def build_model(self) -> nn.Module:
        parts = self.adapters, self.fake_quantiser
        built = build_language_model(self._config, self._reader, self._packs, *parts)
        self._head, self._packs = built.head, built.packed is not None
        if built.packed is not None:
            built.packed.rows = lambda: self.rows
        self._continuation.places = context_length(built.model.config)
        for note in built.notes:
            self._reader.warn(note)
        given = {"input_ids", "position_ids"} if built.takes_positions else {"input_ids"}
        self._inputs = given & built.accepted
        self._extra = {"use_cache": False} if "use_cache" in built.accepted else {}
        return built.model

    # --- batches -----------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Returns input_ids, position_ids, targets: (B, T), int64. Padded at the end, without targets; or, packed, one
        row of all samples end to end (1, total), in which positions begin again with each, and with the padding up to
        `rows`."""
        inputs = [ids[:-1] for ids, _ in samples]
        targets = [np.where(trained[1:], ids[1:], IGNORED) for ids, trained in samples]
        if self._packs:
            positions = [np.arange(len(each)) for each in inputs]
            if self.rows is not None:
                positions.append(self.rows.padding(sum(map(len, inputs))))
                inputs.append(np.zeros_like(positions[-1]))
                targets.append(np.full_like(positions[-1], IGNORED))
            joined = zip(self.by_position, (inputs, positions, targets), strict=True)
            return {name: torch.from_numpy(np.concatenate(each).astype(np.int64))[None] for name, each in joined}
        length = max(map(len, inputs))
        table = np.zeros((3, len(samples), length), dtype=np.int64)
        table[1], table[2] = np.arange(length), IGNORED
        for number, (own, goals) in enumerate(zip(inputs, targets, strict=True)):
            table[0, number, : len(own)], table[2, number, : len(own)] = own, goals
        return {name: torch.from_numpy(rows) for name, rows in zip(self.by_position, table, strict=True)}

    @property
    def by_position(self) -> Mapping[str, int | None]:
        """Returns no tensors for packed rows: positions that began again would be another sequence to Transformers
        too."""
        return {"input_ids": 0, "position_ids": None, "targets": IGNORED}

    def shown(self, sample: Sample) -> str:
        """Returns its text, with the trained parts between brackets."""
        pieces = show(*sample, self._reader.tokenizer)
        return "".join(f"⟦{text}⟧" if trained else text for text, trained in pieces)

    def count(self, batch: Batch) -> int:
        return int((on_host(batch["targets"]) != IGNORED).sum())

    def _given(self, batch: Batch) -> dict[str, Any]:
        return {**{name: batch[name] for name in self._inputs}, **self._extra}

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
        """Returns each sample's loss and number of targets; for a batch that `next_batch` made, the next tokens."""
        targets = batch["targets"]
        if "draws" in batch:
            logits = self._head.logits_at_targets(model, self._given(batch), targets)
            return [{"token": token} for token in self._continuation.chosen(logits, batch["draws"])]
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
            return (batch["position_ids"] == 0).cumsum(1) - 1
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

    def next_batch(self, sequences: Mapping[int, Sequence[int]]) -> Batch:
        rows, self.rows = self.rows, None  # they grow with each token
        batch = self.collate(self._continuation.samples(sequences))
        self.rows = rows
        return {**batch, "draws": self._continuation.draws(sequences)}

    def is_over(self, prompt: Prompt, new: Sequence[int]) -> bool:
        return self._continuation.is_over(prompt, new)

    def answer(self, new: Sequence[int]) -> str:
        return self._continuation.answer(new)

    # --- its plain form, for other software ------------------------------------------------------------------------

    def plain_batch(self, model: nn.Module, samples: Sequence[Sample]) -> PlainBatch:
        del model
        [(ids, trained)] = samples  # each by itself: generating software pads in its own way
        targets = np.where(trained[1:], ids[1:], IGNORED)
        tokens, labels = (torch.from_numpy(each.astype(np.int64))[None] for each in (ids[:-1], targets))
        return PlainBatch({"input_ids": tokens}, labels)

    def dialogues(self, count: int) -> list[Dialogue]:
        return dialogues_of(self._reader, count)

    @property
    def tokenizer(self) -> Any:
        return self._reader.tokenizer

    @property
    def ends(self) -> frozenset[int]:
        return frozenset(self._continuation.ends)

    # --- how batches may be cut --------------------------------------------------------------------------------------

    @property
    def splits_batches(self) -> bool:
        return True

    @property
    def lengths(self) -> Sequence[int] | None:
        return _lengths(self.train) if self.packs or self._config.data.group_by_length else None

    @property
    def evaluation_lengths(self) -> Sequence[int] | None:
        return _lengths(self.evaluation) if self.packs and self.evaluation is not None else None

    @property
    def packs(self) -> bool:
        return self._packs

    def order(self, batch_size: int, seed: int, by_epochs: bool) -> Order:
        if isinstance(self.train, StreamedMixture):
            return self.train.order(batch_size, seed, by_epochs)
        return mixed_order(self.train.sizes, self._mix, batch_size, seed)

    @property
    def evaluation_parts(self) -> Mapping[str, range]:
        """Returns the evaluation samples of each data set that has some."""
        if self.evaluation is None or not self.data_sets:
            return {}
        places = [range(start, stop) for start, stop in pairwise(self.evaluation.starts) if stop > start]
        given = [account.name for account in self._reader.accounts if account.for_evaluation]
        held = [account.name for account in self._reader.accounts if account.held_out]
        return dict(zip(distinct(given or held), places, strict=False))

    @property
    def data_sets(self) -> Sequence[str]:
        names = distinct([account.name for account in self._reader.accounts if not account.for_evaluation])
        return names if self._mix.phases is not None or (self._config.data.stream and len(names) > 1) else ()

    # --- reports and files ------------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        accounts = [account for account in self._reader.accounts if not account.for_evaluation]
        return {
            "stage": self._config.stage,
            "train_samples": known_length(self.train),
            "evaluation_samples": 0 if self.evaluation is None else len(self.evaluation),
            "length": self._config.data.length,
            "vocabulary": len(self._reader.tokenizer),
            "rows_dropped": sum(len(account.bad) + account.too_long + account.without_target for account in accounts),
            "packed": self.packs,
        }

    @property
    def data_report(self) -> Mapping[str, Any]:
        order = self.order(1, self._reader.seed, by_epochs=True)
        return data_report(self._config, self._reader, self.train, self.evaluation, order)

    @property
    def warnings(self) -> Sequence[str]:
        return self._reader.warnings

    def prediction_samples(self, path: str | None) -> NamedSamples:
        if path is not None:
            return self._reader.read_more(path, "--data")
        if self.evaluation is not None:
            return self.evaluation
        if isinstance(self.train, StreamedMixture):
            raise problem("--data", "a stream without evaluation data has none to predict for", "give --data")
        return self.train

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        save_description(model, folder)
        generation_config(model, self._continuation.ends, self._reader.tokenizer).save_pretrained(folder)
        self._reader.tokenizer.save_pretrained(folder)


def _lengths(samples: JoinedSamples | StreamedMixture) -> list[int] | None:
    """Returns the positions of each sample, if they are known before it is read."""
    if isinstance(samples, StreamedMixture):
        return None
    known = [part.lengths for part in samples.parts if isinstance(part, TokenSamples)]
    return [int(length) - 1 for lengths in known for length in lengths] if len(known) == len(samples.parts) else None
