"""The data of a language workload: samples, batches of them, their order and reports. What model learns from them is a
subclass's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from drivetrain.config.language import LanguageModel
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.language.chat import show
from drivetrain.data.language.samples import JoinedSamples, PromptSample, Sample, TokenSamples
from drivetrain.data.mixed_order import mixed_order
from drivetrain.data.order import Order
from drivetrain.data.streams.endless import known_length
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.errors import problem
from drivetrain.workloads.base import Batch, NamedSamples
from drivetrain.workloads.exporting import Speaks
from drivetrain.workloads.language_data import LanguageReader
from drivetrain.workloads.language_mix import distinct
from drivetrain.workloads.language_report import data_report
from drivetrain.workloads.shared_prompts import why_not_shared

IGNORED = -100
NAMES = "input_ids", "position_ids", "targets"


class LanguageSamplesWorkload(Speaks):
    train: JoinedSamples | StreamedMixture
    evaluation: JoinedSamples | None

    def __init__(self, config: LanguageModel, seed: int) -> None:
        self._config, self._reader = config, LanguageReader(config, seed)
        found = self._reader.read()
        self.train, self.evaluation, self._mix = found.train, found.evaluation, found.mix
        self._packs = config.is_packed  # until a model is built that cannot
        self._shares = False

    def _laid_out(self, samples: Sequence[Sample], shared: Sequence[int] | None = None) -> Batch:
        """Returns input_ids, position_ids, targets: (B, T), int64. Padded at the end, without targets; or, packed, one
        row of all samples end to end (1, total), in which positions begin again with each, and with the padding up to
        `rows`.

        shared: packed, how many first tokens of each sample lie in the row already, as those of the last sample that
        shares none (`data.branches`); left out, none do.
        """
        starts = [0] * len(samples) if shared is None else shared
        inputs = [ids[start:-1] for start, (ids, _) in zip(starts, samples, strict=True)]
        targets = [
            np.where(trained[start + 1 :], ids[start + 1 :], IGNORED)
            for start, (ids, trained) in zip(starts, samples, strict=True)
        ]
        if self._packs:
            positions = [np.arange(start, start + len(each)) for start, each in zip(starts, inputs, strict=True)]
            if self.rows is not None:
                positions.append(self.rows.padding(sum(map(len, inputs))))
                inputs.append(np.zeros_like(positions[-1]))
                targets.append(np.full_like(positions[-1], IGNORED))
            joined = zip(NAMES, (inputs, positions, targets), strict=True)
            return {name: torch.from_numpy(np.concatenate(each).astype(np.int64))[None] for name, each in joined}
        length = max(map(len, inputs))
        table = np.zeros((3, len(samples), length), dtype=np.int64)
        table[1], table[2] = np.arange(length), IGNORED
        for number, (own, goals) in enumerate(zip(inputs, targets, strict=True)):
            table[0, number, : len(own)], table[2, number, : len(own)] = own, goals
        return {name: torch.from_numpy(rows) for name, rows in zip(NAMES, table, strict=True)}

    @property
    def tokenizer(self) -> Any:
        return self._reader.tokenizer

    # --- how batches may be cut --------------------------------------------------------------------------------------

    @property
    def splits_batches(self) -> bool:
        return True

    @property
    def lengths(self) -> Sequence[int] | None:
        return self._lengths_of(self.train) if self.packs or self._config.data.group_by_length else None

    @property
    def evaluation_lengths(self) -> Sequence[int] | None:
        return self._lengths_of(self.evaluation) if self.packs and self.evaluation is not None else None

    def _lengths_of(self, samples: JoinedSamples | StreamedMixture) -> list[int] | None:
        """Returns the positions of each sample, if they are known before it is read."""
        if isinstance(samples, StreamedMixture):
            return None
        known = [part.lengths for part in samples.parts if isinstance(part, TokenSamples)]
        return (
            [int(length) - 1 for lengths in known for length in lengths] if len(known) == len(samples.parts) else None
        )

    @property
    def packs(self) -> bool:
        return self._packs

    @property
    def shares_prompts(self) -> bool:
        return self._shares and self._packs

    @shares_prompts.setter
    def shares_prompts(self, shares: bool) -> None:
        self._shares = shares

    def why_not_shared(self, run: RunConfig, machine: Machine) -> str | None:
        return why_not_shared(run, machine, self.tokenizer)

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
            **({"prompts_shared": self.shares_prompts} if self._config.has_alternatives else {}),
        }

    @property
    def data_report(self) -> Mapping[str, Any]:
        order = self.order(1, self._reader.seed, by_epochs=True)
        return data_report(self._config, self._reader, self.train, self.evaluation, order)

    def sides(self, sample: Any) -> Mapping[str, Sample]:
        """Returns the texts of a sample by their names: one, or the two of a pair."""
        return {"text": sample}

    def preview(self, samples: Any, index: int) -> dict[str, Any]:
        """Returns each text of a sample in pieces, with their number of tokens, and whether they end at the length; of
        a prompt to answer the reference too."""
        found, sample = [], samples.load(index, 0)
        is_prompt = isinstance(sample, PromptSample)
        sides = {"prompt": (sample.ids, np.zeros(len(sample.ids), dtype=bool))} if is_prompt else self.sides(sample)
        for name, (ids, targets) in sides.items():
            pieces = show(ids, targets, self._reader.tokenizer)
            segments = [{"text": text, "trained": trained} for text, trained in pieces]
            at_length = len(ids) >= self._config.data.length
            found.append({"name": name, "segments": segments, "length": len(ids), "at_length": at_length})
        return {"sides": found, **({"reference": sample.row.reference} if is_prompt and sample.row.reference else {})}

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
