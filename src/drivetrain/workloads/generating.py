"""Workloads whose model makes something: answers to prompts, or samples that it is then trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import nn

from drivetrain.workloads.base import Batch, Samples, Workload
from drivetrain.workloads.loss_contract import LossContext

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """ids: what the model is fed. reference: what the data answer, where they do."""

    text: str
    ids: tuple[int, ...]
    reference: str | None = None


class Making(Protocol):
    """Passes of the model without gradient over samples that each rank has of its own. All ranks call them together."""

    def each(self, samples: Sequence[Any], work: Callable[[nn.Module, Batch, LossContext], Sequence[T]]) -> list[T]:
        """One result a sample, in their order: what `work` makes of a batch of them."""

    def answers(self, prompts: Sequence[Prompt], draws: Sequence[int]) -> list[list[int]]:
        """The new tokens that follow each prompt, of a workload that `Generates`."""


class MakesSamples(Workload):
    """A workload whose samples are made within a step, by the model as it is then, and used for several updates.

    `train` holds prompts. At every `updates_per_batch`-th step samples are made of the global batch's prompts, shuffled
    and dealt to the updates that follow, each of which is a step. What is made is a part of checkpoints.
    """

    made: list[Any]
    made_at: int | None = None  # the step for whose batch the samples were made

    @property
    @abstractmethod
    def updates_per_batch(self) -> int:
        """Updates that the samples of a batch of prompts are dealt to."""

    @abstractmethod
    def make_samples(self, prompts: Sequence[Any], draws: Sequence[int], passes: Making) -> Sequence[Sequence[Any]]:
        """Samples, as `collate` takes them, of each of this rank's prompts; called by all ranks together.

        Made of tensors, numbers, strings, lists, tuples and dicts, the forms of a checkpoint. draws: a number for each
        prompt, for what is drawn for it: a function of the seed, the step and its place in the batch.
        """

    def keep_made(self, step: int, samples: list[Any]) -> None:
        """Takes the samples of all ranks, made at this step."""
        self.made_at, self.made = step, samples

    def state_dict(self) -> dict[str, Any]:
        return {} if self.made_at is None else {"made_at": self.made_at, "made": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.made_at, self.made = state.get("made_at"), state.get("made", [])


class Generates(ABC):
    """A workload that may be asked to go on with prompts, token by token: generation/ does it."""

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """Empty where nobody asked."""

    @property
    @abstractmethod
    def answers_samples(self) -> bool:
        """Whether samples that are predicted for are answered too."""

    @abstractmethod
    def prompts_for(self, samples: Samples, numbers: Iterable[int]) -> Mapping[int, Prompt]:
        """Number of one of these samples → the prompt to answer beside what is predicted for it, where it has one."""

    @abstractmethod
    def next_batch(self, sequences: Mapping[int, Sequence[int]]) -> Batch:
        """sequences: prompt's number → its ids and those that follow so far. `predict` gives {"token": id} of each."""

    @abstractmethod
    def is_over(self, prompt: Prompt, new: Sequence[int]) -> bool:
        """Whether nothing follows these new tokens."""

    @abstractmethod
    def answer(self, new: Sequence[int]) -> str:
        """The text of the new tokens."""
