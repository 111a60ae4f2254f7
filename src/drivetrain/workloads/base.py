"""The workload contract: all that an engine or the loop may know about model, data and loss.

The loss is a *sum* over valid targets and `count` is their number, known before the forward pass: the engine divides by
the count of the whole global batch, so that neither micro-batches nor ranks change the result. A loss of several such
terms, with statistics of the global batch or models beside it, overrides `terms`, `counts`, `loss_sums` and others of
the section "a loss of more" (loss_contract.py defines these).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.order import GlobalOrder, Order
from drivetrain.data.row_shape import Rows
from drivetrain.data.streams.endless import Endless, draws
from drivetrain.errors import problem
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.models.normalisation import has_batch_norm
from drivetrain.workloads.loss_contract import LOSS, ONE_TERM, Auxiliary, LossContext, Partial, Precomputed
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.shown import in_words

Batch = dict[str, Tensor]
T = TypeVar("T")


class Samples(Protocol):
    """Indexed samples. `load` is a pure function of (seed, epoch, index), so that workers and ranks do not matter."""

    def __len__(self) -> int: ...

    def load(self, index: int, epoch: int) -> Any:
        """Returns one sample as `collate` takes it, augmented if these are training samples."""


class NamedSamples(Samples, Protocol):
    """Samples to predict for, with the user's name for each: a file name, a row number."""

    @property
    def names(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Outputs:
    """The results of one evaluation batch.

    loss_sum: scalar, summed over `count` targets. predictions, targets: arguments of `metrics` (B, ...). terms: (sum,
    count) of each term if the loss has several; loss_sum and count are not read then.
    """

    loss_sum: Tensor
    count: int
    predictions: Tensor
    targets: Tensor
    terms: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class BestMetric:
    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class Layout:
    """Describes how a model may be spread over a mesh. Fields left out are derived where that is safe."""

    tensor_parallel: Mapping[str, str] | None = None  # module name, * for any part → colwise, rowwise, ...


class Workload(ABC):
    """A model with its data, loss and metrics. `train` and `evaluation` hold the samples once it is built."""

    train: Samples
    evaluation: Samples | None
    adapters: AdapterSet | None = None  # put into each model that is built
    fake_quantiser: FakeQuantiser | None = None  # prepares each of them before that
    has_batch_norm: bool = False  # the model that was built last
    rows: Rows | None = None  # which a training fills packed rows up to
    shares_prompts: bool = False  # whether a training lays answers to one prompt behind it, which lies there once

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Returns a new model in fp32 on the CPU, with its adapters. Its random start follows torch's global
        generator."""

    def _adapted(self, model: nn.Module) -> nn.Module:
        self.has_batch_norm = has_batch_norm(model)
        if self.fake_quantiser is not None:
            self.fake_quantiser.prepare(model)
        return model if self.adapters is None else self.adapters.fit(model)

    def write_parts(self, model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the parts that were put into the model, beside a checkpoint's weights."""
        if self.adapters is not None:
            self.adapters.write(model, weights, folder)
        if self.fake_quantiser is not None:
            self.fake_quantiser.write(model, folder)

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> Batch:
        """Returns a dict of tensors for samples; the first dimension is the sample."""

    def count(self, batch: Batch) -> int:
        """Returns the number of valid targets in the batch. A loss of one term defines this and `loss_sum`; others
        define `counts`."""
        if type(self).counts is Workload.counts:
            raise NotImplementedError(f"{type(self).__name__} defines neither count nor counts")
        return sum(self.counts(batch).values())

    def tokens(self, batch: Batch) -> int | None:
        """Returns the number of tokens in a training batch on the CPU, padding left out; None if samples have none."""
        del batch
        return None

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the loss summed over the batch's valid targets, a scalar in fp32 where the precision allows it."""
        raise NotImplementedError(f"{type(self).__name__} defines neither loss_sum nor loss_sums")

    # --- a loss of more: several terms, statistics, auxiliary models, state (most workloads leave these as they are) --

    @property
    def terms(self) -> Mapping[str, float]:
        """Name and weight of each term of the loss."""
        return ONE_TERM

    def counts(self, batch: Batch) -> Mapping[str, int]:
        """Returns the divisor of each term's sum for this batch: for one the number of pairs, for another of tokens.
        Needs no forward pass."""
        return {LOSS: self.count(batch)}

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        """Returns each term's sum over the batch (scalars, fp32), from one forward pass with gradient."""
        del context
        return {LOSS: self.loss_sum(model, batch)}

    @property
    def second_pass(self) -> str | None:
        """Returns what runs the model itself a second time over each batch, in words; None: one pass is all."""
        return None

    @property
    def has_statistics(self) -> bool:
        """Whether a window begins with a pass that calls `statistics` for each of its micro-batches."""
        return False

    def statistics(self, model: nn.Module, batch: Batch, context: LossContext) -> Partial:
        """Returns this batch's part of the statistics of the global batch. The model evaluates, without gradient."""
        del model, batch, context
        return Partial()

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        """The models beside the trained one, by name."""
        return {}

    def build_auxiliary(self, name: str) -> nn.Module:
        """Returns a new model of those that `auxiliary` has and that are no copies, on the CPU."""
        build = self.auxiliary[name].build
        assert build is not None
        return build()

    def precomputed(self, training: bool) -> Sequence[Precomputed]:
        """Returns what is computed of samples with the model as it starts, before a training or an evaluation alone."""
        del training
        return ()

    @property
    def computed_beside(self) -> Workload | None:
        """Returns this workload with another model, whose `precomputed` numbers these samples carry; None if there is
        none. It is evaluated before this one's model is built."""
        return None

    def outputs_in(self, model: nn.Module, batch: Batch, context: LossContext) -> Outputs:
        """Runs one evaluation forward that may use auxiliary models; there are no statistics."""
        del context
        return self.outputs(model, batch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the workload's own state that changes during training, in a checkpoint's forms; the same on all
        ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        del state

    # --- evaluation and what else a workload says ---------------------------------------------------------------------

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Runs one evaluation forward."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Returns one JSON-able row a sample, in the batch's order (e.g. `{"label": "cat", "probability": 0.93}`)."""

    @abstractmethod
    def metrics(self) -> Mapping[str, Metric]:
        """Returns fresh metrics, each taking (predictions, targets). `loss` is added by the loop."""

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns further metrics that follow from the loss and the metrics of a whole evaluation."""
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
        """Returns the length of each training sample if batches should be cut by it into micro-batches, else None."""

    @property
    def evaluation_lengths(self) -> Sequence[int] | None:
        """Returns the length of each evaluation sample if packed rows may be filled by it, else None."""
        return None

    @property
    def packs(self) -> bool:
        """Whether `collate` lays samples end to end, so that none needs padding."""
        return False

    def why_not_shared(self, run: RunConfig, machine: Machine) -> str | None:
        """Returns the reason that answers do not share their prompt; None where they do."""
        del run, machine
        return "a sample has one answer"

    def order(self, batch_size: int, seed: int, by_epochs: bool) -> Order:
        """Returns which training samples each step takes. by_epochs: whether the run's length is a number of epochs; a
        stream has to be counted for that."""
        if isinstance(self.train, Endless):
            return self.train.order(batch_size, seed, by_epochs)
        return GlobalOrder(len(self.train), batch_size, seed)

    @property
    def data_sets(self) -> Sequence[str]:
        """The names of a mixture's data sets, in the order's numbering; empty if there is none."""
        return ()

    @property
    def evaluation_parts(self) -> Mapping[str, range]:
        """Returns which evaluation samples belong to each data set of a mixture; empty if there is none."""
        return {}

    @property
    def layout(self) -> Layout:
        return Layout()

    @property
    def by_position(self) -> Mapping[str, int | None]:
        """Returns the batch's tensors (samples, positions, ...) of sequences that may be cut, with their padding values
        (None: they count on): each position has a loss of its own, and only attention looks at others."""
        return {}

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Returns the report's facts about the data: samples, classes, rows dropped and why (JSON-able)."""

    @property
    def data_report(self) -> Mapping[str, Any]:
        """Returns the report of `drivetrain data` (JSON-able)."""
        return self.facts

    @property
    @abstractmethod
    def warnings(self) -> Sequence[str]:
        """Returns warnings before training (rows dropped, BatchNorm whose statistics depend on the cut)."""

    def shown(self, sample: Any) -> str:
        """Returns a training sample, as from `train.load`, in readable form."""
        return in_words(sample)

    def preview(self, samples: Any, index: int) -> dict[str, Any]:
        """Returns a sample as a person looks at it (JSON-able): `text`, or in its place a `picture` (PNG as a data URL)
        or `sides` (its texts in pieces that are trained on or not), and its `reference`."""
        return {"text": self.shown(samples.load(index, 0)), **self.described(samples, index)}

    @abstractmethod
    def prediction_samples(self, path: str | None) -> NamedSamples:
        """Returns samples to predict for: those at `path` (labels not needed), or the evaluation samples."""

    def text_samples(self, texts: Sequence[str]) -> NamedSamples:
        """Returns samples to predict for, made of texts that were typed. Raises UserError if samples are no texts."""
        del texts
        raise problem("--text", "this workload's samples are not texts", "give --data, a file or a folder of them")

    def described(self, samples: Any, index: int) -> dict[str, Any]:
        """Returns what a prediction's row has of the sample itself: its text, the label in the data."""
        del samples, index
        return {}

    @abstractmethod
    def save_assets(self, model: nn.Module, folder: Path) -> None:
        """Writes the files that must lie beside the weights to load the model elsewhere (config.json, tokenizer,
        labels)."""


def few(workload: Workload, count: int = 2) -> Batch:
    """Returns a batch of the first samples."""
    return workload.collate([workload.train.load(index, 0) for index in draws(workload.train, count)])
