"""Trains a language model on what a teacher holds likely: a divergence between both distributions at each target."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drivetrain.config.distillation import SFT, TEACHER
from drivetrain.config.language import LanguageModel
from drivetrain.models.cross_entropy import cross_entropies
from drivetrain.models.divergences import Divergence, divergences
from drivetrain.models.language_head import places_of_targets
from drivetrain.workloads.base import Batch, Outputs
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.loss_contract import NO_CONTEXT, ONE_TERM, Auxiliary, LossContext
from drivetrain.workloads.metrics import MeanOfColumn, Metric
from drivetrain.workloads.other_model import OtherModel

NAME = "teacher"
COLUMNS = {"token_accuracy": True, "sft_loss": False, "teacher_agreement": True, "teacher_loss": None}


class DistillationWorkload(LanguageModelWorkload):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        block = config.distillation
        self._losses = block.losses
        self._measures = {name: Divergence(name, block.beta, block.temperature) for name in block.divergences}  # type: ignore[arg-type]
        self._other = OtherModel(block.teacher, TEACHER, config, self._reader)

    # --- the teacher --------------------------------------------------------------------------------------------------

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return {NAME: self._other.beside(lambda: self._other.build(self._packs, lambda: self.rows))}

    @property
    def by_position(self) -> Mapping[str, int | None]:
        """Returns no tensors: a teacher beside the model reads whole sequences."""
        return {}

    # --- the loss -----------------------------------------------------------------------------------------------------

    @property
    def terms(self) -> Mapping[str, float]:
        return ONE_TERM if list(self._losses.values()) == [1.0] else self._losses

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return dict.fromkeys(self.terms, self.count(batch))

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        other = self._teachers(batch, context)
        own = self._head.logits_at_targets(model, self._given(batch), batch["targets"])
        return self._terms_of(own, other, batch)

    def _teachers(self, batch: Batch, context: LossContext) -> Tensor:
        """Returns the teacher's logits at targets, (N, V)."""
        with torch.no_grad():
            return self._other.logits_at_targets(context.auxiliary[NAME], batch)

    def _terms_of(self, own: Tensor, other: Tensor, batch: Batch) -> dict[str, Tensor]:
        found = {}
        for term, name in zip(self.terms, self._losses, strict=True):
            if name == SFT:
                losses = cross_entropies(own, _targets(batch))
            else:
                losses = divergences(own, other, self._measures[name])
            found[term] = losses.sum()
        return found

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return self.outputs_in(model, batch, NO_CONTEXT)

    @torch.no_grad()
    def outputs_in(self, model: nn.Module, batch: Batch, context: LossContext) -> Outputs:
        other = self._teachers(batch, context)
        own = self._head.logits_at_targets(model, self._given(batch), batch["targets"])
        count = self.count(batch)
        sums = self._terms_of(own, other, batch)
        terms = {name: (each, count) for name, each in sums.items()}
        found = own.new_zeros(0, len(COLUMNS), dtype=torch.float32)
        if count:
            targets, likeliest, theirs = _targets(batch), own.argmax(1), other.argmax(1)
            columns = (likeliest == targets, cross_entropies(own, targets), likeliest == theirs)
            found = torch.stack([each.float() for each in (*columns, cross_entropies(other, targets))], 1)
        return Outputs(next(iter(sums.values())), count, found, found, terms if len(terms) > 1 else {})

    def metrics(self) -> Mapping[str, Metric]:
        """Returns token_accuracy; sft_loss and teacher_loss, the cross-entropy of the data's tokens under model and
        teacher; teacher_agreement, the share of targets at which both hold the same token likeliest."""
        columns = enumerate(COLUMNS.items())
        return {name: MeanOfColumn(number, higher, by_sample=False) for number, (name, higher) in columns}

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns perplexity: exp of sft_loss."""
        return {"perplexity": math.exp(min(values["sft_loss"], 700.0))}


def _targets(batch: Batch) -> Tensor:
    """Returns the tokens at targets, (N,)."""
    targets = batch["targets"]
    return targets.flatten()[places_of_targets(targets)]
