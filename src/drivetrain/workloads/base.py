"""The workload contract: all that an engine or the loop may know about what is trained.

The loss is a *sum* over valid targets and `count` is their number, known before the forward pass: the engine divides
by the count of the whole global batch, so that neither micro-batches nor ranks change the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from drivetrain.data.order import MixturePart
from drivetrain.data.row_shape import Rows
from drivetrain.errors import problem
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.shown import in_words

Batch = dict[str, Tensor]


class Samples(Protocol):
    """Indexed samples. `load` is a pure function of (seed, epoch, index), so that workers and ranks do not matter."""

    def __len__(self) -> int: ...

    def load(self, index: int, epoch: int) -> Any:
        """One sample as `collate` takes it, augmented if these are training samples."""


class NamedSamples(Samples, Protocol):
    """Samples to predict for, with what the user calls each of them: a file name, a row number."""

    @property
    def names(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Outputs:
    """What one evaluation batch gives.

    loss_sum: scalar, summed over `count` targets. predictions, targets: what `metrics` take (B, ...).
    """

    loss_sum: Tensor
    count: int
    predictions: Tensor
    targets: Tensor


@dataclass(frozen=True)
class BestMetric:
    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class Layout:
    """How a model may be spread over a mesh. What is left out is derived where that is safe."""

    tensor_parallel: Mapping[str, str] | None = None  # module name, * for any part → colwise, rowwise, ...


class Workload(ABC):
    """A model with its data, loss and metrics. `train` and `evaluation` hold the samples once it is built."""

    train: Samples
    evaluation: Samples | None
    adapters: AdapterSet | None = None  # put into each model that is built
    fake_quantiser: FakeQuantiser | None = None  # prepares each of them before that
    rows: Rows | None = None  # which a training fills packed rows up to

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model in fp32 on the CPU, with its adapters. Its random start follows torch's global generator."""

    def _adapted(self, model: nn.Module) -> nn.Module:
        if self.fake_quantiser is not None:
            self.fake_quantiser.prepare(model)
        return model if self.adapters is None else self.adapters.fit(model)

    def write_parts(self, model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """What was put into the model, beside a checkpoint's weights."""
        if self.adapters is not None:
            self.adapters.write(model, weights, folder)
        if self.fake_quantiser is not None:
            self.fake_quantiser.write(model, folder)

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples → a dict of tensors whose first dimension is the sample."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """Valid targets in the batch."""

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scalar: the loss summed over the batch's valid targets, in fp32 where the precision allows it."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """One evaluation forward."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """One JSON-able row a sample, in the batch's order (e.g. `{"label": "cat", "probability": 0.93}`)."""

    @abstractmethod
    def metrics(self) -> Mapping[str, Metric]:
        """Fresh metrics, each taking (predictions, targets). `loss` is added by the loop."""

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """Further metrics that follow from the loss and the metrics of a whole evaluation."""
        del values
        return {}

    @property
    @abstractmethod
    def best_metric(self) -> BestMetric:
        """The metric that decides which checkpoint is best, unless the run file names another."""

    @property
    @abstractmethod
    def splits_batches(self) -> bool:
        """Whether the loss is a sum over samples, so that a batch may be cut into micro-batches."""

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int] | None:
        """Length of each training sample if batches should be cut by it into micro-batches, else None."""

    @property
    def evaluation_lengths(self) -> Sequence[int] | None:
        """Length of each evaluation sample where packed rows may be filled by it, else None."""
        return None

    @property
    def packs(self) -> bool:
        """Whether `collate` lays samples end to end, so that none needs padding."""
        return False

    @property
    def mixture(self) -> Sequence[MixturePart] | None:
        """Parts of the training samples that are taken by weight; None where each is taken once an epoch."""
        return None

    @property
    def shuffle_buffer(self) -> int | None:
        """Neighbours among which training samples may be shuffled; None where any may come at any time."""
        return None

    @property
    def layout(self) -> Layout:
        return Layout()

    @property
    def by_position(self) -> Mapping[str, int | None]:
        """The batch's tensors (samples, positions, ...) of sequences that may be cut, and what pads them (None: they
        count on): each position has a loss of its own, and only attention looks at others."""
        return {}

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the report says of the data: samples, classes, rows dropped and why (JSON-able)."""

    @property
    def data_report(self) -> Mapping[str, Any]:
        """What `drivetrain data` tells (JSON-able)."""
        return self.facts

    @property
    @abstractmethod
    def warnings(self) -> Sequence[str]:
        """What the user should hear before training (rows dropped, BatchNorm whose statistics depend on the cut)."""

    def shown(self, sample: Any) -> str:
        """A training sample, as `train.load` gives it, for the eye."""
        return in_words(sample)

    @abstractmethod
    def prediction_samples(self, path: str | None) -> NamedSamples:
        """Samples to predict for: those at `path` (labels not needed), or the evaluation samples."""

    def text_samples(self, texts: Sequence[str]) -> NamedSamples:
        """Return samples to predict for, made of texts that were typed. UserError where texts are no samples."""
        del texts
        raise problem("--text", "this workload's samples are not texts", "give --data, a file or a folder of them")

    def described(self, samples: Any, index: int) -> dict[str, Any]:
        """Return what a prediction's row says of the sample itself: its text, the label that the data give."""
        del samples, index
        return {}

    @abstractmethod
    def save_assets(self, model: nn.Module, folder: Path) -> None:
        """Write what must lie beside the weights to load the model elsewhere (config.json, tokenizer, labels)."""


@dataclass(frozen=True)
class Prompt:
    """ids: what the model is fed. reference: what the data answer, where they do."""

    text: str
    ids: tuple[int, ...]
    reference: str | None = None


class Generates(ABC):
    """A workload that may be asked to go on with prompts, token by token: generation.py does it."""

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


def few(workload: Workload, count: int = 2) -> Batch:
    """A batch of the first samples."""
    return workload.collate([workload.train.load(index, 0) for index in range(min(count, len(workload.train)))])
