"""The common part of stages that learn from preferences or rewards: log-probabilities of answers, under the model and
under the reference that it is held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from drivetrain.config.language import LanguageModel
from drivetrain.models.adapters_off import adapters_off
from drivetrain.models.language_head import places_of_targets
from drivetrain.workloads.base import Batch
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.loss_contract import Auxiliary, LossContext

REFERENCE = "reference"


class AgainstReference(LanguageModelWorkload):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self._held_to = config.held_to

    @property
    def by_position(self) -> Mapping[str, int | None]:
        """Returns no tensors: the loss is of whole answers."""
        return {}

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        if self._held_to.reference != "copy":
            return {}
        every = self._held_to.reference_every
        if every is None:
            return {REFERENCE: Auxiliary("frozen")}
        return {REFERENCE: Auxiliary("moved", every=every, mixing=self._held_to.reference_mixing)}

    @contextmanager
    def _reference(self, model: Any, context: LossContext) -> Iterator[Callable[..., Any] | None]:
        """Gives the reference, to be called as the model is, without gradient or dropout; None for a uniform one."""
        with torch.no_grad():
            match self._held_to.reference:
                case "copy":
                    yield context.auxiliary[REFERENCE]
                case "adapters_off":
                    with adapters_off(model):
                        yield model
                case _:
                    yield None

    def _answers(self, model: Callable[..., Any], batch: Batch, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the log-probability of each target, (N,); the answer that it belongs to, (N,); and how many targets
        each of the `count` answers has."""
        targets = batch["targets"]
        losses = self._head.losses(model, self._given(batch), targets)  # type: ignore[arg-type]
        owner = self._sample_of(batch).flatten()[places_of_targets(targets)]
        return -losses, owner, numbers_of(owner, count)


class FromPreferences(AgainstReference):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self._settings, self._beta = config.preference, config.preference.beta_of(config.stage)
        self._losses = config.preference.losses(config.stage)


def numbers_of(owner: Tensor, count: int) -> Tensor:
    """Returns how many values each answer has, (count,) int64. `torch.bincount` would wait for the device."""
    return torch.zeros(count, dtype=torch.int64, device=owner.device).index_add(0, owner, torch.ones_like(owner))


def summed(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Returns the sum of each answer's values, (count,) fp32."""
    return torch.zeros(count, dtype=torch.float32, device=values.device).index_add(0, owner, values)
