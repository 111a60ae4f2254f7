"""Trains a language model on rewards by proximal policy optimization, with a value head beside it.

The value head sees the hidden state at each token of an answer and estimates what the answer will be rewarded. The
advantage of a token is how much better things went on from there than was estimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.models.cross_entropy import cross_entropies
from drivetrain.models.language_head import places_of_targets
from drivetrain.workloads.advantages import gae, whitened
from drivetrain.workloads.against_reference import numbers_of
from drivetrain.workloads.base import Batch
from drivetrain.workloads.loss_contract import LOSS, Auxiliary, LossContext
from drivetrain.workloads.made_answers import VALUES
from drivetrain.workloads.policy import PolicyWorkload
from drivetrain.workloads.policy_losses import Tokens, clipped

VALUE = "value"  # the value head among the auxiliary models, and the loss's second term
BEFORE, RETURNS = "old_values", "returns"  # of a batch: the value head's estimates as answers were made, and their aims


class PpoWorkload(PolicyWorkload):
    columns = (*VALUES, BEFORE, RETURNS)

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        self._width = int(model.config.get_text_config().hidden_size)
        return model

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return {**super().auxiliary, VALUE: Auxiliary("trained", self._head_of_zeros, "zeros")}

    def _head_of_zeros(self) -> nn.Module:
        """Returns a head that estimates 0 everywhere at first, whatever the seed."""
        head = nn.Linear(self._width, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    # --- the loss -----------------------------------------------------------------------------------------------------

    @property
    def terms(self) -> Mapping[str, float]:
        return {LOSS: 1.0, VALUE: self._learning.value_weight}

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        """Returns the sums over tokens: of the clipped loss, Schulman et al. 2017, "Proximal Policy Optimization
        Algorithms", equation 7; and of half the larger squared error of the value, as it is or within `value_clip` of
        the estimate before (Huang et al. 2022, "The 37 Implementation Details of PPO", detail 9)."""
        policy, values, owner, lengths = self._with_values(model, batch, context)
        places = places_of_targets(batch["targets"])
        advantage, old, _, before, returns = (batch[name].flatten()[places] for name in self.columns)
        old = torch.where(old.isnan(), policy.detach(), old)  # of invented answers
        bound = self._learning.value_clip
        near = before + (values - before).clamp(-bound, bound)
        errors = torch.maximum((values - returns).square(), (near - returns).square()) / 2
        tokens = Tokens(policy, old, advantage, owner, lengths)
        losses = self._corrected(clipped(tokens, self._learning, self._importance), batch, places)
        return {LOSS: losses.sum(), VALUE: errors.sum()}

    def _with_values(
        self, model: nn.Module, batch: Batch, context: LossContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns of each target its log-probability and the value before it, (N,); its answer, (N,); and how many
        targets each answer has."""
        targets = batch["targets"]
        places = places_of_targets(targets)
        logits, hidden = self._head.logits_and_hidden(model, self._given(batch), targets)
        losses = cross_entropies(logits / self._learning.temperature, targets.flatten()[places])
        values = context.auxiliary[VALUE](hidden)[:, 0].float()
        owner = self._sample_of(batch).flatten()[places]
        return -losses, values, owner, numbers_of(owner, self._count(batch))

    def invented(self, prompt: Any, number: int) -> Any:
        made = super().invented(prompt, number)
        return {**made, RETURNS: torch.linspace(-1.0, 1.0, len(made["old"]))}

    # --- answers ------------------------------------------------------------------------------------------------------

    def _of_tokens(self, model: nn.Module, batch: Batch, context: LossContext) -> tuple[dict[str, Tensor], Tensor]:
        policy, values, _, lengths = self._with_values(model, batch, context)
        return {"old": policy, BEFORE: values}, lengths

    def _with_advantages(self, samples: Sequence[dict[str, Any]], rewards: Tensor) -> list[dict[str, Any]]:
        """Returns the answers with advantages of each token, whitened over the whole batch, and returns. An answer
        without a reward is not learned from."""
        del rewards
        made = []
        for each in samples:
            if math.isnan(each["reward"]):
                each = {**each, "learned": 0, **dict.fromkeys(("old", "reference", BEFORE), torch.zeros(0))}
            steps = torch.zeros_like(each["old"])
            if len(steps):
                if len(each["reference"]):
                    steps -= self._learning.beta * (each["old"] - each["reference"])
                steps[-1] += each["reward"]
            found = gae(steps, each[BEFORE], self._learning.gamma, self._learning.gae_lambda)
            made.append({**each, "advantages": found, RETURNS: found + each[BEFORE]})
        whole = whitened([each["advantages"] for each in made])
        return [
            {**each, "advantages": own, "advantage": float(own.mean()) if len(own) else 0.0}
            for each, own in zip(made, whole, strict=True)
        ]
