"""Trains a language model on answers that are labelled as desirable or not: KTO and its kin.

The reference point of KTO, the divergence of the model from the reference, is estimated over the whole global batch, on
prompts with answers of other samples: a pass without gradient before the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.language import LanguageModel
from drivetrain.config.preference import LOSSES
from drivetrain.data.language.samples import JoinedSamples, Labelled, LabelledSamples, Sample
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.errors import problem
from drivetrain.workloads.against_reference import CARRIED, FromPreferences, summed
from drivetrain.workloads.base import Batch, Outputs, Samples
from drivetrain.workloads.exporting import PlainBatch
from drivetrain.workloads.generating import Prompt
from drivetrain.workloads.language_data import TRAIN
from drivetrain.workloads.language_model import NAMES
from drivetrain.workloads.language_prompts import OwnSamples, prompts_of_samples
from drivetrain.workloads.loss_contract import LOSS, NO_CONTEXT, LossContext, Partial
from drivetrain.workloads.metrics import MeanOfColumn, Metric
from drivetrain.workloads.unpaired_losses import FORMULAS, weights

MISMATCHED = "mismatched_"  # names of a batch's tensors that hold prompts with answers of other samples
# the columns of predictions, (B, 6); the first two are means over desirable, the next over undesirable answers
COLUMNS = ("desirable", "reward_desirable", "undesirable", "reward_undesirable", "logp", "tokens")


class UnpairedWorkload(FromPreferences):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        [self._loss] = self._losses
        _check_labels(self.train)

    # --- batches ------------------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Labelled]) -> Batch:
        """Returns the samples, `desirable` (B,) int64, and the mismatched ones where the loss needs them."""
        batch = self._laid_out([each.own for each in samples])
        if self.has_statistics:
            beside = self._laid_out([each.mismatched for each in samples])
            batch |= {f"{MISMATCHED}{name}": tensor for name, tensor in beside.items()}
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
        """Returns the sum of the mismatched answers' log-ratios, and their number."""
        ratios, _, _ = self._ratios(model, self._mismatched(batch), self.count(batch), context)
        return Partial(sums={"ratios": ratios.sum(), "answers": ratios.new_tensor(float(len(ratios)))})

    def _mismatched(self, batch: Batch) -> Batch:
        """Returns the prompts with answers of other samples."""
        other = {name: batch[f"{MISMATCHED}{name}"] for name in NAMES}
        return {**other, CARRIED: batch[CARRIED].flip(1)} if CARRIED in batch else other

    def _reference_rows(self, model: nn.Module, batch: Batch) -> Tensor:
        count = self.count(batch)
        parts = [batch, self._mismatched(batch)] if self.has_statistics else [batch]
        found = [summed(*self._answers(model, each, count)[:2], count) for each in parts]
        return torch.stack([found[0], found[-1]], 1)

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        ratios, _, _ = self._ratios(model, batch, self.count(batch), context)
        return {LOSS: self._loss_of(ratios, batch, context.statistics.sums)}

    def _loss_of(self, ratios: Tensor, batch: Batch, sums: Mapping[str, Tensor]) -> Tensor:
        kl = (sums["ratios"] / sums["answers"]).clamp(min=0) if sums else ratios.new_zeros(())
        desirable = batch["desirable"].bool()
        losses = FORMULAS[self._loss](ratios, desirable, kl, self._beta)
        return (losses * weights(desirable, self._settings)).sum()

    def _ratios(
        self, model: Callable[..., Any], batch: Batch, count: int, context: LossContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (B,) each: log-ratios, log-probabilities, tokens."""
        if CARRIED in batch:
            compared = batch[CARRIED][:, 0]
        else:
            with self._reference(model, context) as reference:
                assert reference is not None
                compared = summed(*self._answers(reference, batch, count)[:2], count)
        found, owner, tokens = self._answers(model, batch, count)
        own = summed(found, owner, count)
        return own - compared, own, tokens

    # --- evaluation and prediction ------------------------------------------------------------------------------------

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return self.outputs_in(model, batch, NO_CONTEXT)

    def outputs_in(self, model: nn.Module, batch: Batch, context: LossContext) -> Outputs:
        """Runs an evaluation, whose batches have reference points of their own."""
        sums = self.statistics(model, batch, context).sums if self.has_statistics else {}
        ratios, logps, tokens = self._ratios(model, batch, self.count(batch), context)
        desirable, rewards = batch["desirable"].float(), self._beta * ratios
        columns = (desirable, rewards * desirable, 1 - desirable, rewards * (1 - desirable), logps, tokens.float())
        found = torch.stack(columns, 1)
        return Outputs(self._loss_of(ratios, batch, sums), self.count(batch), found, found)

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


def _check_labels(samples: object) -> None:
    """Raises UserError if all labels are the same: nothing says what to move away from, or towards."""
    parts = samples.parts if isinstance(samples, JoinedSamples) else []
    labels = {bool(label) for part in parts if isinstance(part, LabelledSamples) for label in part.desirable}
    if len(labels) == 1:
        only = "desirable (true)" if labels == {True} else "undesirable (false)"
        fix = "give rows of both kinds" + (", or workload.stage: sft" if labels == {True} else "")
        raise problem(TRAIN, f"every answer is labelled as {only}", fix)
