"""The common part of stages that learn from preferences or rewards: log-probabilities of answers, under the model and
under the reference that it is held to."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.language import LanguageModel
from drivetrain.data.array_store import default_root
from drivetrain.data.language.samples import JoinedSamples, samples_digest, with_reference
from drivetrain.models.adapters_off import adapters_off
from drivetrain.models.digest import digest, digest_of
from drivetrain.models.language_head import places_of_targets
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.generating import AnswersBeside
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.loss_contract import Auxiliary, LossContext, Precomputed
from drivetrain.workloads.other_model import OtherModel

REFERENCE = "reference"
CARRIED = "reference_logps"  # a batch's tensor of them, (B, 2)


class AgainstReference(LanguageModelWorkload, AnswersBeside):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self._held_to, given = config.held_to, config.held_to.reference_model
        field = f"{config.held_to_field}.reference_model"
        self._other = None if given.path is None else OtherModel(given, field, config, self._reader)

    @property
    def by_position(self) -> Mapping[str, int | None]:
        """Returns no tensors: the loss is of whole answers."""
        return {}

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        if self._held_to.reference != "copy":
            return {}
        other = self._other
        if other is not None:
            return {REFERENCE: other.beside(lambda: other.build(self._packs, lambda: self.rows))}
        every = self._held_to.reference_every
        if every is None:
            return {REFERENCE: Auxiliary("frozen")}
        return {REFERENCE: Auxiliary("moved", every=every, mixing=self._held_to.reference_mixing)}

    @property
    def second_pass(self) -> str | None:
        return "a second pass of the model with its adapters off" if self._held_to.reference == "adapters_off" else None

    @contextmanager
    def _reference(self, model: Any, context: LossContext) -> Iterator[Callable[..., Any] | None]:
        """Gives the reference, to be called as the model is, without gradient or dropout; None for a uniform one."""
        with torch.no_grad():
            match self._held_to.reference:
                case "copy":
                    with self._read_as(self._other):
                        yield context.auxiliary[REFERENCE]
                case "adapters_off":
                    with adapters_off(model):
                        yield model
                case "none":
                    yield None
                case other:  # auto, which a resolved run has no longer: a uniform reference would train something else
                    raise AssertionError(f"no reference is chosen: {other}")

    @contextmanager
    def _read_as(self, other: OtherModel | None) -> Iterator[None]:
        """Within the block batches are for another model, whose head and arguments are its own."""
        if other is None:
            yield
            return
        own = self._head, self._inputs
        self._head, self._inputs = other.head, other.inputs
        try:
            yield
        finally:
            self._head, self._inputs = own

    @property
    def reference_answers(self) -> Literal["never", "once", "anew"]:
        """Returns "never" for a uniform reference, and for one of which only log-probabilities are left."""
        if self._held_to.reference not in ("copy", "adapters_off"):
            return "never"
        return "once" if self._held_to.reference_every is None else "anew"

    @contextmanager
    def answering_reference(self, model: nn.Module, context: LossContext) -> Iterator[nn.Module]:
        with self._reference(model, context) as reference:
            assert reference is not None, "no reference answers"
            yield reference if isinstance(reference, nn.Module) else _Called(reference)

    def _answers(self, model: Callable[..., Any], batch: Batch, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the log-probability of each target, (N,); the answer that it belongs to, (N,); and how many targets
        each of the `count` answers has."""
        targets = batch["targets"]
        losses = self._head.losses(model, self._given(batch), targets)  # type: ignore[arg-type]
        owner = self._sample_of(batch).flatten()[places_of_targets(targets)]
        return -losses, owner, numbers_of(owner, count)


class _Called(nn.Module):
    """A model beside the trained one as a module, whose call is the engine's way to run it."""

    def __init__(self, companion: Any) -> None:
        super().__init__()
        self.model, self._call = companion.model, companion

    def forward(self, *given: Any, **named: Any) -> Any:
        return self._call(*given, **named)


class FromPreferences(AgainstReference):
    def __init__(self, config: LanguageModel, seed: int) -> None:
        super().__init__(config, seed)
        self._settings, self._beta = config.preference, config.preference.beta_of(config.stage)
        self._losses = config.preference.losses(config.stage)
        self._weights: str | None = None  # digest of the model that was built last; None without its numbers
        self._is_other = False  # whether the model is the reference's own

    def build_model(self) -> nn.Module:
        if self._is_other:
            assert self._other is not None
            model = self._other.build(self._packs, lambda: self.rows)
            self._head, self._inputs = self._other.head, self._other.inputs
        else:
            model = super().build_model()
        self._weights = digest_of(model) if self._caches else None
        return model

    # --- a reference that is computed once --------------------------------------------------------------------------

    @property
    def _caches(self) -> bool:
        return self._held_to.reference == "cached"

    @property
    def computed_beside(self) -> Workload | None:
        """Returns this workload with the other model in place of its own, where that one is the reference."""
        if not self._caches or self._other is None:
            return None
        beside = copy.copy(self)  # of the same samples, which then carry what is computed
        beside._is_other, beside.adapters, beside.fake_quantiser = True, None, None
        return beside

    def precomputed(self, training: bool) -> Sequence[Precomputed]:
        """Returns the log-probabilities of both answers of each sample under the model as it starts, or under the
        other one that it is compared with."""
        if not self._caches or (self._other is not None and not self._is_other):
            return ()
        data = [each for each in (self.train if training else None, self.evaluation) if each is not None]
        folder = self._config.data.cache or default_root()
        return [self._precomputed(each, folder) for each in data if isinstance(each, JoinedSamples)]

    def _precomputed(self, samples: JoinedSamples, folder: Path) -> Precomputed:
        def take(values: np.ndarray) -> None:
            places = zip(samples.parts, pairwise(samples.starts), strict=True)
            samples.parts = [with_reference(part, values[start:stop]) for part, (start, stop) in places]

        header = [self._config.stage, self._settings.ld_alpha, samples_digest(samples)]
        key = None if self._weights is None else digest([self._weights, *map(str, header)])
        return Precomputed(folder, key, samples, 2, self._reference_rows, take)

    @abstractmethod
    def _reference_rows(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the model's log-probabilities of both answers of each sample, (B, 2)."""

    def _carried(self, samples: Sequence[Any]) -> Batch:
        """Returns the part of a batch that holds the reference's log-probabilities, (B, 2), where they are cached; 0
        before they are computed."""
        if not self._caches:
            return {}
        nothing = np.zeros(2, dtype=np.float32)
        rows = [nothing if each.reference is None else each.reference for each in samples]
        return {CARRIED: torch.from_numpy(np.stack(rows).astype(np.float32))}


def numbers_of(owner: Tensor, count: int) -> Tensor:
    """Returns how many values each answer has, (count,) int64. `torch.bincount` would wait for the device."""
    return torch.zeros(count, dtype=torch.int64, device=owner.device).index_add(0, owner, torch.ones_like(owner))


def summed(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Returns the sum of each answer's values, (count,) fp32."""
    return torch.zeros(count, dtype=torch.float32, device=values.device).index_add(0, owner, values)
