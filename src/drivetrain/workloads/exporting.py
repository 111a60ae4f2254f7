"""Workloads whose model can be used outside of this project: its inputs in the plain form that other software feeds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from drivetrain.workloads.base import Workload

IGNORED = -100
TARGETS = ("labels", "target")  # what a batch has beside the model's inputs


@dataclass(frozen=True)
class PlainBatch:
    """inputs: keyword arguments of a plain forward pass of the model. labels: (B,) classes, or (B, T) next tokens, with
    IGNORED where there is none; None where the data have none of either kind."""

    inputs: dict[str, Tensor]
    labels: Tensor | None


@dataclass(frozen=True)
class Dialogue:
    """A conversation as a chat template takes it, and the ids that the run feeds to get the reply."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    ids: tuple[int, ...]


class Exportable(Workload):
    """A workload with plain inputs: its own batches, unless it overrides `plain_batch`."""

    def plain_batch(self, model: nn.Module, samples: Sequence[Any]) -> PlainBatch:
        """Returns samples, as `load` gives them, as one batch in the form that plain software feeds to `model`."""
        del model
        batch = self.collate(samples)
        inputs = {name: tensor.contiguous() for name, tensor in batch.items() if name not in TARGETS}
        return PlainBatch(inputs, batch.get("labels"))


class Speaks(Exportable):
    """A workload whose model reads texts by a tokenizer, and perhaps by a chat template."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """Transformers' tokenizer."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer; none where nothing is answered."""
        return frozenset()

    def dialogues(self, count: int) -> list[Dialogue]:
        """Returns up to `count` conversations with what the run's own chat template makes of them; none without one."""
        del count
        return []

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of texts, without special tokens around them."""
        found: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found
