"""A workload whose model draws no dropout and keeps BatchNorm fixed, so that two ways of computing it can be compared.

Dropout masks are drawn on each rank, and BatchNorm's statistics are of each rank's share: with either, one process and
several compute different results by design, which no comparison could distinguish from a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.order import Order
from drivetrain.data.row_shape import Rows
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.models.normalisation import is_batch_norm, keep_statistics
from drivetrain.workloads.base import Batch, BestMetric, Layout, NamedSamples, Outputs, Samples, Workload
from drivetrain.workloads.loss_contract import Auxiliary, LossContext, Partial, Precomputed
from drivetrain.workloads.metrics import Metric

DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)


class Stilled(Workload):
    """Wraps a workload so that its model is deterministic; counts what it had to switch off."""

    adapters: AdapterSet | None = None  # the inner workload's
    fake_quantiser: FakeQuantiser | None = None

    def __init__(self, inner: Workload, train: Samples, evaluation: Samples | None) -> None:
        """train, evaluation: data in place of the inner workload's."""
        self._inner = inner
        self.train, self.evaluation, self.adapters = train, evaluation, inner.adapters
        self.fake_quantiser = inner.fake_quantiser
        self.dropouts = self.batch_norms = 0

    def build_model(self) -> nn.Module:
        model = self._inner.build_model()
        self.dropouts = self.batch_norms = 0
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                module.p = 0.0
                self.dropouts += 1
            if is_batch_norm(module):
                self.batch_norms += 1
                keep_statistics(module)
        return model

    @property
    def has_batch_norm(self) -> bool:  # type: ignore[override]
        return self._inner.has_batch_norm

    def collate(self, samples: Sequence[Any]) -> Batch:
        return self._inner.collate(samples)

    def count(self, batch: Batch) -> int:
        return self._inner.count(batch)

    def tokens(self, batch: Batch) -> int | None:
        return self._inner.tokens(batch)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._inner.loss_sum(model, batch)

    @property
    def terms(self) -> Mapping[str, float]:
        return self._inner.terms

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return self._inner.counts(batch)

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        return self._inner.loss_sums(model, batch, context)

    @property
    def second_pass(self) -> str | None:
        return self._inner.second_pass

    @property
    def has_statistics(self) -> bool:
        return self._inner.has_statistics

    def statistics(self, model: nn.Module, batch: Batch, context: LossContext) -> Partial:
        return self._inner.statistics(model, batch, context)

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return self._inner.auxiliary

    def build_auxiliary(self, name: str) -> nn.Module:
        return self._inner.build_auxiliary(name)

    def precomputed(self, training: bool) -> Sequence[Precomputed]:
        return self._inner.precomputed(training)

    @property
    def computed_beside(self) -> Workload | None:
        other = self._inner.computed_beside
        return None if other is None else Stilled(other, self.train, self.evaluation)

    def outputs_in(self, model: nn.Module, batch: Batch, context: LossContext) -> Outputs:
        return self._inner.outputs_in(model, batch, context)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return self._inner.outputs(model, batch)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        return self._inner.predict(model, batch)

    def metrics(self) -> Mapping[str, Metric]:
        return self._inner.metrics()

    @property
    def best_metric(self) -> BestMetric:
        return self._inner.best_metric

    @property
    def splits_batches(self) -> bool:
        return self._inner.splits_batches

    @property
    def lengths(self) -> Sequence[int] | None:
        return self._inner.lengths

    @property
    def evaluation_lengths(self) -> Sequence[int] | None:
        return self._inner.evaluation_lengths

    @property
    def packs(self) -> bool:
        return self._inner.packs

    @property
    def rows(self) -> Rows | None:
        return self._inner.rows

    @rows.setter
    def rows(self, rows: Rows | None) -> None:
        self._inner.rows = rows

    @property
    def shares_prompts(self) -> bool:
        return self._inner.shares_prompts

    @shares_prompts.setter
    def shares_prompts(self, shares: bool) -> None:
        self._inner.shares_prompts = shares

    def why_not_shared(self, run: RunConfig, machine: Machine) -> str | None:
        return self._inner.why_not_shared(run, machine)

    def order(self, batch_size: int, seed: int, by_epochs: bool) -> Order:
        return self._inner.order(batch_size, seed, by_epochs)

    @property
    def evaluation_parts(self) -> Mapping[str, range]:
        return self._inner.evaluation_parts

    @property
    def data_sets(self) -> Sequence[str]:
        return self._inner.data_sets

    @property
    def data_report(self) -> Mapping[str, Any]:
        return self._inner.data_report

    def derived(self, values: Mapping[str, float]) -> dict[str, float]:
        return self._inner.derived(values)

    @property
    def layout(self) -> Layout:
        return self._inner.layout

    @property
    def by_position(self) -> Mapping[str, int | None]:
        return self._inner.by_position

    @property
    def facts(self) -> dict[str, Any]:
        return self._inner.facts

    @property
    def warnings(self) -> Sequence[str]:
        return self._inner.warnings

    def shown(self, sample: Any) -> str:
        return self._inner.shown(sample)

    def prediction_samples(self, path: str | None) -> NamedSamples:
        return self._inner.prediction_samples(path)

    def text_samples(self, texts: Sequence[str]) -> NamedSamples:
        return self._inner.text_samples(texts)

    def preview(self, samples: Any, index: int) -> dict[str, Any]:
        return self._inner.preview(samples, index)

    def described(self, samples: Any, index: int) -> dict[str, Any]:
        return self._inner.described(samples, index)

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        self._inner.save_assets(model, folder)

    def write_parts(self, model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
        self._inner.write_parts(model, weights, folder)


class _NoDropout(TorchFunctionMode):
    """Dropout that a model calls as a function (attention's, above all)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextmanager
def without_dropout() -> Iterator[None]:
    with _NoDropout():
        yield
