"""Trains a reward model on pairs of answers: a language model with one score for each, read at its last token.

The model is Transformers' sequence classifier of one label, so that `AutoModelForSequenceClassification` loads it. The
last token is the one that Transformers finds: the last that is no padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.data.language.samples import JoinedSamples, Pair, Sample
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.workloads.base import Batch, Outputs
from drivetrain.workloads.exporting import PlainBatch
from drivetrain.workloads.loss_contract import LOSS, ONE_TERM, LossContext
from drivetrain.workloads.metrics import MeanOfColumn, Metric
from drivetrain.workloads.preference import SIDES, pair_lengths
from drivetrain.workloads.scoring import ScoringWorkload

CENTRING = "centring"
COLUMNS = {"reward_accuracy": True, "reward_chosen": True, "reward_rejected": False}  # of predictions, (P, 3)


class RewardWorkload(ScoringWorkload):
    def sides(self, sample: Pair) -> Mapping[str, Sample]:
        return dict(zip(SIDES, sample.sides, strict=True))

    # --- batches ------------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Pair]) -> Batch:
        """Returns input_ids (2B, T) int64, chosen and rejected in turns, padded at the end; or, packed, one row of all
        (1, total), with position_ids that begin again with each (or with each answer, where both share their prompt),
        and `ends` (2B,), where each has its last token that is no padding. margins: (B,) fp32."""
        answers = [side[0] for pair in samples for side in pair.sides]
        margins = torch.tensor([pair.margin for pair in samples], dtype=torch.float32)
        if not self._packs:
            return {"input_ids": self._padded(answers), "margins": margins}
        # as the classifier itself finds them
        ends = np.array([len(ids) - 1 - np.argmax(ids[::-1] != self._pad) for ids in answers])
        shared = [count for pair in samples for count in (0, pair.shared if self.shares_prompts else 0)]
        starts = np.minimum(shared, ends)  # where an answer is padding alone, it ends in its prompt
        places = [np.arange(start, len(ids)) for start, ids in zip(starts, answers, strict=True)]
        own = [ids[start:] for start, ids in zip(starts, answers, strict=True)]
        rows = np.concatenate(own), np.concatenate(places)
        ids, positions = (torch.from_numpy(row.astype(np.int64))[None] for row in rows)
        before = np.cumsum([0, *(len(each) for each in own[:-1])])
        given = {"input_ids": ids, "position_ids": positions, "ends": torch.from_numpy(before + ends - starts)}
        return {**given, "margins": margins}

    def shown(self, sample: Pair) -> str:
        texts = [self._reader.tokenizer.decode(ids.tolist()) for ids, _ in sample.sides]
        return f"chosen: {texts[0]}\nrejected: {texts[1]}"

    def _lengths_of(self, samples: JoinedSamples | StreamedMixture) -> list[int] | None:
        return pair_lengths(samples, self.packs, self.shares_prompts) if isinstance(samples, JoinedSamples) else None

    # --- the loss -----------------------------------------------------------------------------------------------------

    @property
    def terms(self) -> Mapping[str, float]:
        weight = self._config.preference.centring
        return {LOSS: 1.0, CENTRING: weight} if weight else ONE_TERM

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return dict.fromkeys(self.terms, len(batch["margins"]))

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        del context
        return self._sums(self._rewards(model, batch), batch)

    def _sums(self, rewards: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the loss of Bradley and Terry 1952, -log σ(r_chosen - r_rejected - margin) (the margin: Touvron et
        al. 2023, "Llama 2", equation 2), and the centring (r_chosen + r_rejected)² (Eisenstein et al. 2023, "Helping or
        Herding?", section 3)."""
        chosen, rejected = rewards.unbind(1)
        sums = {LOSS: -F.logsigmoid(chosen - rejected - batch["margins"]).sum()}
        return sums if CENTRING not in self.terms else {**sums, CENTRING: (chosen + rejected).square().sum()}

    def _rewards(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns (P, 2) fp32: the scores of the chosen and the rejected answers."""
        given = {name: batch[name] for name in ("input_ids", "position_ids", "ends") if name in batch}
        scores: Tensor = model(**given, **self._extra).logits
        return scores.float().view(-1, 2)

    # --- evaluation and prediction ------------------------------------------------------------------------------------

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        rewards, count = self._rewards(model, batch), len(batch["margins"])
        sums = self._sums(rewards, batch)
        right = (rewards[:, 0] > rewards[:, 1]).float()[:, None]
        found = torch.cat([right, rewards], 1)
        terms = {name: (value, count) for name, value in sums.items()} if len(sums) > 1 else {}
        return Outputs(sums[LOSS], count, found, found, terms)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        names = "reward_chosen", "reward_rejected"
        rows = self._rewards(model, batch).tolist()
        return [{name: round(score, 6) for name, score in zip(names, row, strict=True)} for row in rows]

    def metrics(self) -> Mapping[str, Metric]:
        return {name: MeanOfColumn(number, higher) for number, (name, higher) in enumerate(COLUMNS.items())}

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        return {"reward_margin": values["reward_chosen"] - values["reward_rejected"]}

    # --- files --------------------------------------------------------------------------------------------------------

    def plain_batch(self, model: nn.Module, samples: Sequence[Pair]) -> PlainBatch:
        del model
        return self._plain([pair.chosen[0] for pair in samples])
