"""Supervised fine-tuning whose loss weighs each token by what the model holds likely there: DFT, EAFT, ASFT.

Evaluations report the plain cross-entropy, so that runs with different losses can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.config.fine_tuning import ASFT, DFT
from drivetrain.config.language import LanguageModel
from drivetrain.models.cross_entropy import cross_entropies
from drivetrain.models.divergences import Divergence, divergences
from drivetrain.models.language_head import places_of_targets
from drivetrain.workloads.against_reference import AgainstReference
from drivetrain.workloads.base import Batch
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.loss_contract import LOSS, LossContext

LIKELIEST = 20  # tokens whose entropy stands for that of all
LARGEST = 3.0  # what it is divided by: about that of 20 even tokens, ln 20
FROM_REFERENCE = Divergence("forward_kl")


class WeightedLikelihoodWorkload(AgainstReference):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self._loss, self._alpha = config.sft.loss, config.sft.alpha_or_usual

    @property
    def by_position(self) -> Mapping[str, int | None]:
        """Returns what its base has, except where a reference reads whole sequences."""
        return {} if self._loss == ASFT else LanguageModelWorkload.by_position.__get__(self)

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        targets = batch["targets"]
        if self._loss == DFT:
            return {LOSS: of_probabilities(self._head.losses(model, self._given(batch), targets)).sum()}
        other = self._references(model, batch, context) if self._loss == ASFT else None
        logits = self._head.logits_at_targets(model, self._given(batch), targets)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits  # of engine.loss_parallel
        losses = cross_entropies(logits, targets.flatten()[places_of_targets(targets)])
        if other is None:
            return {LOSS: of_entropies(losses, logits, self._alpha).sum()}
        return {LOSS: (of_probabilities(losses) + self._alpha * divergences(logits, other, FROM_REFERENCE)).sum()}

    def _references(self, model: nn.Module, batch: Batch, context: LossContext) -> Tensor:
        """Returns the reference's logits at targets, (N, V)."""
        with self._reference(model, context) as reference:
            assert reference is not None
            return self._head.logits_at_targets(reference, self._given(batch), batch["targets"])  # type: ignore[arg-type]


def of_probabilities(losses: Tensor) -> Tensor:
    """Returns each token's cross-entropy times its own probability, which is a constant: Wu et al. 2025, "On the
    Generalization of SFT" (DFT), equation 9. ASFT adds the divergence of the model from a reference: Zhu et al. 2025,
    "Anchored Supervised Fine-Tuning", here KL(reference || model), as LLaMA-Factory computes it.

    losses: (N,) cross-entropies, with gradients.
    """
    return losses * torch.exp(-losses.detach())


def of_entropies(losses: Tensor, logits: Tensor, alpha: float) -> Tensor:
    """Returns each token's cross-entropy times a power of the entropy there, which is a constant: Diao et al. 2026,
    "Entropy-Adaptive Fine-Tuning", with the entropy of the 20 likeliest tokens alone, divided by 3, as its authors
    compute it.

    losses: (N,); logits: (N, V).
    """
    likeliest = logits.detach().topk(min(LIKELIEST, logits.shape[1]), dim=1).values.float().log_softmax(1)
    entropies = -(likeliest.exp() * likeliest).sum(1)
    return losses * (entropies / LARGEST).pow(alpha)
