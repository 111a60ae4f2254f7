"""Workloads whose model generates: answers to prompts, or samples that it is then trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from torch import nn

from drivetrain.config.generation import Generation
from drivetrain.config.rollout_server import RolloutServer
from drivetrain.data.language.samples import PromptRow
from drivetrain.data.ordered_cuts import OrderedSizes
from drivetrain.runtime.journal import Journal
from drivetrain.workloads.base import Batch, Samples, Workload
from drivetrain.workloads.loss_contract import LossContext

T = TypeVar("T")
OF_REWARD = "reward_"  # begins the names of single rewards among the metrics of an answer


@dataclass(frozen=True)
class Prompt:
    """A prompt. ids: the model's input. reference: the answer in the data, if any. name: file and row, of a prompt of a
    file that is predicted for. row: of a prompt whose answers are judged by it."""

    text: str
    ids: tuple[int, ...]
    reference: str | None = None
    name: str | None = None
    row: PromptRow | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Drawn:
    """An answer that was made to learn from. tokens: the new ones; logprobs: the log-probability with which the
    generator drew each."""

    tokens: list[int]
    logprobs: list[float]


Came = Callable[[int, Drawn], None]  # gets an answer and the number of its prompt


def dropped(number: int, result: object) -> None:
    del number, result


@dataclass(frozen=True)
class Rollout:
    """The report on samples that a model made. metrics: means over all of them. samples: each in words, JSON-able.
    warnings: what the user should look at."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    warnings: list[str]


class Making(Protocol):
    """Passes of the model without gradient over samples that each rank has of its own. All ranks call them together."""

    def each(self, samples: Sequence[Any], work: Callable[[nn.Module, Batch, LossContext], Sequence[T]]) -> list[T]:
        """Returns one result a sample, in their order: the result of `work` on a batch of them."""

    def answers(
        self, prompts: Sequence[Prompt], draws: Sequence[int], settings: Generation | None = None, came: Came = dropped
    ) -> list[Drawn]:
        """Returns the answer that follows each prompt, for a workload that `Generates`. settings: how they are
        chosen, where it is not by the workload's own. came: called with each as it comes, where a server draws them, on
        one of the ranks that share samples."""

    @property
    def by_server(self) -> bool:
        """Whether a server draws answers: asked twice it may give two."""

    def once(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which of the ranks that share samples one does."""

    def of_data_ranks(self, value: T) -> list[T]:
        """Returns the value of each rank that has samples of its own; of the ranks that share samples, one's."""

    @property
    def journal(self) -> Journal:
        """Results of an earlier start of the run."""


class MakesSamples(Workload):
    """A workload whose samples are made within a step, by the model as it is then, and used for several updates.

    `train` holds prompts. At every `steps_per_batch`-th step samples are made of the global batch's prompts, shuffled
    and divided among the updates that follow, each of which is a step; then shuffled anew, for each further pass over
    them. These samples are a part of checkpoints.
    """

    made: list[Any]
    made_at: int | None = None  # the step for whose batch the samples were made
    passes_per_batch: int = 1  # over the samples of a batch of prompts
    server: RolloutServer | None = None  # draws answers in the model's place
    server_field = "workload.reinforcement.server"  # which names it in the run file
    reads_logprobs = True  # those that a server gives with its answers
    longest_made: int | None = None  # tokens of a prompt with its answer, of which the rest is not read

    @property
    @abstractmethod
    def updates_per_batch(self) -> int:
        """The number of updates among which the samples of a batch of prompts are divided."""

    @property
    def steps_per_batch(self) -> int:
        return self.updates_per_batch * self.passes_per_batch

    @abstractmethod
    def make_samples(self, prompts: Sequence[Any], draws: Sequence[int], passes: Making) -> Sequence[Sequence[Any]]:
        """Returns samples, as `collate` takes them, of each of this rank's prompts; called by all ranks together.

        Made of tensors, numbers, strings, lists, tuples and dicts, the forms of a checkpoint. draws: a number for each
        prompt, which seeds its random draws: a function of the seed, the step and its place in the batch.
        """

    def made_sizes(self, samples: Sequence[Any]) -> OrderedSizes | None:
        """Returns how many tokens each of the samples has in a batch of them in this order; None: samples have no
        tokens, so that a bound in tokens bounds nothing."""
        del samples
        return None

    def start_processes(self, keep: bool) -> None:
        """Starts the processes beside the run that `make_samples` asks. Raises UserError for what cannot run in them: a
        training calls this before it makes its folder, and a dry run too. keep: whether they go on once they are
        ready."""

    def stand_ins(self, prompts: Sequence[Any]) -> Sequence[Any]:
        """Returns samples as many, and each as large, as may be made of these prompts: memory is planned with them."""
        return prompts

    def invented(self, prompt: Any, number: int) -> Any:
        """Returns a sample, as `collate` takes it, in place of one that the model would make of the prompt: a function
        of the prompt and its number alone, with a loss and a gradient. Engines are compared with them."""
        del number
        return prompt

    def keep_made(self, step: int, samples: list[Any]) -> None:
        """Receives the samples of all ranks, made at this step."""
        self.made_at, self.made = step, samples

    def rollout(self) -> Rollout | None:
        """Returns the report on the samples that were made last; None where there is nothing to report."""
        return None

    def rollout_means(self) -> dict[str, float]:
        """Returns means over the newest batches of samples, for the run's report; empty where there are none."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.made_at is None else {"made_at": self.made_at, "made": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.made_at, self.made = state.get("made_at"), state.get("made", [])


@dataclass(frozen=True)
class JudgedAnswer:
    """The metrics of an answer, the same names for all, NaN where it has no value; "reward" is the sum of rewards, and
    OF_REWARD with a name one of them. failures: by the names of rewards that failed, the reasons."""

    metrics: Mapping[str, float]
    failures: Mapping[str, str]


class JudgesAnswers(Workload):
    """A workload whose evaluation is of answers that its model makes to the evaluation samples, which are prompts."""

    @abstractmethod
    def judged(self, prompts: Sequence[Any], draws: Sequence[int], passes: Making) -> list[JudgedAnswer]:
        """Returns the answer to each of this rank's prompts as it is judged. Called by all ranks together."""


class AnswersBeside(ABC):
    """A workload whose model is held to a reference, which answers the same prompts at evaluations."""

    @property
    @abstractmethod
    def reference_answers(self) -> Literal["never", "once", "anew"]:
        """Returns whether there is a reference that can answer, and whether its answers change during a training."""

    @abstractmethod
    def answering_reference(self, model: nn.Module, context: LossContext) -> AbstractContextManager[nn.Module]:
        """Gives the reference within a block, wrapped by the engine as the model is."""


class Generates(ABC):
    """A workload whose model can continue prompts: generation/ does it."""

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """The prompts; empty if none are configured."""

    @property
    @abstractmethod
    def answers_samples(self) -> bool:
        """Returns whether samples that are predicted for are answered too."""

    @abstractmethod
    def prompts_for(self, samples: Samples, numbers: Iterable[int]) -> Mapping[int, Prompt]:
        """Returns number of one of these samples → the prompt to answer beside its prediction, if it has one."""

    @abstractmethod
    def prompts_of(self, texts: Sequence[str]) -> Sequence[Prompt]:
        """Returns the prompts that texts of a user are. Raises UserError for one that cannot be answered."""

    @abstractmethod
    def prompts_in(self, path: str) -> Sequence[Prompt] | None:
        """Returns the prompts of the rows at `path`, some of which have no reply; None where all have one, or rows are
        no prompts: then they are samples. Raises UserError with all rows that cannot be answered."""

    @property
    @abstractmethod
    def settings(self) -> Generation:
        """Returns how answers are chosen, and how long they may be."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """Returns the seed of what is drawn."""

    @property
    @abstractmethod
    def ends(self) -> frozenset[int]:
        """Returns the tokens that end an answer."""

    @property
    @abstractmethod
    def places(self) -> int | None:
        """Returns the length of the longest sequence that the model has positions for; None if there is no bound."""

    @abstractmethod
    def decoded(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens."""

    @abstractmethod
    def batch_of(self, sequences: Sequence[Sequence[int]]) -> Batch:
        """Returns a batch of which `predict` returns {"logits": (vocabulary,)} of each: those behind a sequence."""
