"""Trains a language model on answers that are labelled as desirable or not: KTO and its kin.

The reference point of KTO, the divergence of the model from the reference, is estimated over the whole global batch, on
prompts with answers of other samples: passes without gradient before the window. There the reference reads each
sample's own answer too, beside the other one (where answers may share their prompt, behind the same prompt), and the
loss finds these log-probabilities among the statistics' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.language import LanguageModel
from drivetrain.config.preference import LOSSES
from drivetrain.data.language.samples import JoinedSamples, Labelled, LabelledSamples, Sample
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.errors import problem
from drivetrain.workloads.against_reference import CARRIED, REFERENCE, FromPreferences, summed
from drivetrain.workloads.base import Batch, Outputs, Samples
from drivetrain.workloads.exporting import PlainBatch
from drivetrain.workloads.generating import Prompt
from drivetrain.workloads.language_data import TRAIN
from drivetrain.workloads.language_model import NAMES
from drivetrain.workloads.language_prompts import OwnSamples, prompts_of_samples
from drivetrain.workloads.loss_contract import LOSS, NO_CONTEXT, LossContext, Partial, Statistics
from drivetrain.workloads.metrics import MeanOfColumn, Metric
from drivetrain.workloads.unpaired_losses import FORMULAS, weights

# names of a batch's tensors: prompts with answers of other samples, and prompts that own and other answers share
MISMATCHED, BOTH = "mismatched_", "both_"
# the columns of predictions, (B, 6); the first two are means over desirable, the next over undesirable answers
COLUMNS = ("desirable", "reward_desirable", "undesirable", "reward_undesirable", "logp", "tokens")


class UnpairedWorkload(FromPreferences):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        [self._loss] = self._losses
        _check_labels(self.train)

    # --- batches ------------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Labelled]) -> Batch:
        """Returns the samples, `desirable` (B,) int64, and the mismatched ones where the loss needs them; where both
        share their prompt, also one row of own and mismatched answers in turns, for the reference."""
        batch = self._laid_out([each.own for each in samples])
        if self.has_statistics:
            beside = {MISMATCHED: self._laid_out([each.mismatched for each in samples])}
            if self.shares_prompts and not self._caches:
                shared = [count for each in samples for count in (0, each.shared)]
                beside[BOTH] = self._laid_out([side for each in samples for side in each.sides], shared)
            batch |= {f"{what}{name}": tensor for what, rows in beside.items() for name, tensor in rows.items()}
        labels = torch.tensor([int(each.desirable) for each in samples])
        return {**batch, "desirable": labels, **self._carried(samples)}

    def shown(self, sample: Labelled) -> str:
        label = "desirable" if sample.desirable else "undesirable"
        return f"{label}: {super().shown(sample.own)}"

    def sides(self, sample: Labelled) -> Mapping[str, Sample]:
        return {"desirable" if sample.desirable else "undesirable": sample.own}

    def _lengths_of(self, samples: JoinedSamples | StreamedMixture) -> list[int] | None:
        """Returns the positions of each sample; the mismatched ones pass without gradient."""
        if not isinstance(samples, JoinedSamples):
            return None
        return [int(n) - 1 for part in samples.parts if isinstance(part, LabelledSamples) for n in part.own.lengths]

    # --- the loss -----------------------------------------------------------------------------------------------------

    def count(self, batch: Batch) -> int:
        return len(batch["desirable"])

    @property
    def has_statistics(self) -> bool:
        return LOSSES[self._loss].whole_batch

    def statistics(self, model: nn.Module, batch: Batch, context: LossContext) -> Partial:
        """Returns the sum of the mismatched answers' log-ratios, and their number; in rows, (B,), the reference's
        log-probabilities of own answers, unless the batch carries them."""
        rows = {}
        if CARRIED in batch:
            compared = batch[CARRIED][:, 1]
        else:
            with self._reference(model, context) as reference:
                assert reference is not None
                rows[REFERENCE], compared = self._of_both(reference, batch).unbind(1)
        count = self.count(batch)
        found, owner, _ = self._answers(model, _named(batch, MISMATCHED), count)
        ratios = summed(found, owner, count) - compared
        return Partial({"ratios": ratios.sum(), "answers": ratios.new_tensor(float(count))}, rows)

    def _of_both(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Returns log-probabilities of own and mismatched answers, (B, 2); in one pass where they share prompts."""
        count = self.count(batch)
        if f"{BOTH}targets" in batch:
            found, owner, _ = self._answers(model, _named(batch, BOTH), 2 * count)
            return summed(found, owner, 2 * count).view(-1, 2)
        parts = [self._answers(model, each, count) for each in (batch, _named(batch, MISMATCHED))]
        return torch.stack([summed(found, owner, count) for found, owner, _ in parts], 1)

    def _reference_rows(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.has_statistics:
            return self._of_both(model, batch)
        count = self.count(batch)
        found, owner, _ = self._answers(model, batch, count)
        return summed(found, owner, count)[:, None].expand(-1, 2)

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        ratios, _, _ = self._ratios(model, batch, context)
        return {LOSS: self._loss_of(ratios, batch, context.statistics.sums)}

    def _loss_of(self, ratios: Tensor, batch: Batch, sums: Mapping[str, Tensor]) -> Tensor:
        kl = (sums["ratios"] / sums["answers"]).clamp(min=0) if sums else ratios.new_zeros(())
        desirable = batch["desirable"].bool()
        losses = FORMULAS[self._loss](ratios, desirable, kl, self._beta)
        return (losses * weights(desirable, self._settings)).sum()

    def _ratios(self, model: Callable[..., Any], batch: Batch, context: LossContext) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (B,) each: log-ratios, log-probabilities, tokens."""
        compared, count = self._compared(model, batch, context), self.count(batch)
        found, owner, tokens = self._answers(model, batch, count)
        own = summed(found, owner, count)
        return own - compared, own, tokens

    def _compared(self, model: Callable[..., Any], batch: Batch, context: LossContext) -> Tensor:
        """Returns the reference's log-probabilities of own answers, (B,): those that are known, else by a pass."""
        rows, own = context.statistics.rows, context.statistics.own
        if REFERENCE in rows and own is not None:
            return rows[REFERENCE][own]
        if CARRIED in batch:
            return batch[CARRIED][:, 0]
        with self._reference(model, context) as reference:
            assert reference is not None
            count = self.count(batch)
            return summed(*self._answers(reference, batch, count)[:2], count)

    # --- evaluation and prediction ------------------------------------------------------------------------------------

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return self.outputs_in(model, batch, NO_CONTEXT)

    def outputs_in(self, model: nn.Module, batch: Batch, context: LossContext) -> Outputs:
        """Runs an evaluation, whose batches have reference points of their own."""
        if self.has_statistics:
            found = self.statistics(model, batch, context)
            own = torch.arange(self.count(batch), device=batch["targets"].device)
            context = replace(context, statistics=Statistics(found.sums, found.rows, own))
        ratios, logps, tokens = self._ratios(model, batch, context)
        desirable, rewards = batch["desirable"].float(), self._beta * ratios
        columns = (desirable, rewards * desirable, 1 - desirable, rewards * (1 - desirable), logps, tokens.float())
        predictions = torch.stack(columns, 1)
        loss = self._loss_of(ratios, batch, context.statistics.sums)
        return Outputs(loss, self.count(batch), predictions, predictions)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Returns each answer's log-probability; for a batch that `next_batch` made, the next tokens."""
        if "draws" in batch:
            return super().predict(model, batch)
        count = self.count(batch)
        found, owner, tokens = self._answers(model, batch, count)
        logps = summed(found, owner, count).tolist()
        rows = zip(logps, tokens.tolist(), batch["desirable"].tolist(), strict=True)
        return [
            {"logp": round(logp, 6), "tokens": tokens, "desirable": bool(desirable)} for logp, tokens, desirable in rows
        ]

    def metrics(self) -> Mapping[str, Metric]:
        return {
            "reward_desirable": MeanOfColumn(1, True, weight=0),
            "reward_undesirable": MeanOfColumn(3, False, weight=2),
            "logp": MeanOfColumn(4, None),
            "tokens": MeanOfColumn(5, None),
        }

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        return {"reward_margin": values["reward_desirable"] - values["reward_undesirable"]}

    # --- prompts, and the plain form --------------------------------------------------------------------------------

    def prompts_for(self, samples: Samples, numbers: Iterable[int]) -> Mapping[int, Prompt]:
        return prompts_of_samples(OwnSamples(samples), numbers, self._reader.tokenizer)

    def plain_batch(self, model: nn.Module, samples: Sequence[Labelled]) -> PlainBatch:
        return super().plain_batch(model, [each.own for each in samples])


def _named(batch: Batch, prefix: str) -> Batch:
    """Returns the rows whose names have the prefix, as those of a batch of their own."""
    return {name: batch[f"{prefix}{name}"] for name in NAMES}


def _check_labels(samples: object) -> None:
    """Raises UserError if all labels are the same: nothing says what to move away from, or towards."""
    parts = samples.parts if isinstance(samples, JoinedSamples) else []
    labels = {bool(label) for part in parts if isinstance(part, LabelledSamples) for label in part.desirable}
    if len(labels) == 1:
        only = "desirable (true)" if labels == {True} else "undesirable (false)"
        fix = "give rows of both kinds" + (", or workload.stage: sft" if labels == {True} else "")
        raise problem(TRAIN, f"every answer is labelled as {only}", fix)
