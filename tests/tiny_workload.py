"""A workload small enough to be repeated by hand in a test, and the single engine around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.config.engines import EngineConfig
from drivetrain.config.engines import SingleEngine as Single
from drivetrain.config.machine import Machine
from drivetrain.config.precision import PRECISIONS
from drivetrain.config.training import Optimizer, Scaler
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines import build_engine
from drivetrain.engines.base import Engine, EngineOptions
from drivetrain.optim.optimizers import optimizer_factory
from drivetrain.runtime.hardware import detect
from drivetrain.workloads.base import Batch, BestMetric, Outputs, Workload
from drivetrain.workloads.metrics import Metric

FEATURES, CLASSES, IGNORED = 8, 3, -100
CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))
OTHER_ABILITIES = {"splits_batches": True, "lengths": None, "facts": {}, "warnings": (), "best": ("accuracy", True)}


class Rows:
    """Samples: features (N, FEATURES) and labels (N,), some of them IGNORED."""

    def __init__(self, num_samples: int, seed: int = 0, ignored_share: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(num_samples, FEATURES, generator=generator)
        self.labels = (self.features @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
        self.labels[torch.rand(num_samples, generator=generator) < ignored_share] = IGNORED
        self.names = [f"row {i}" for i in range(num_samples)]

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002  the contract's signature
        return self.features[index], self.labels[index]

    def batch(self, *indices: int) -> Batch:
        return {"features": self.features[list(indices)], "labels": self.labels[list(indices)]}

    def micro(self, *indices: int) -> MicroBatch:
        return MicroBatch(self.batch(*indices))


class TinyWorkload(Workload):
    """Softmax regression through `build()`: (B, FEATURES) → logits (B, CLASSES)."""

    def __init__(
        self, build: Callable[[], nn.Module], train: Rows | None = None, evaluation: Rows | None = None, **other: Any
    ) -> None:
        """other: what OTHER_ABILITIES names."""
        self._build = build
        self.train = train or Rows(40)
        self.evaluation = evaluation
        self._other = OTHER_ABILITIES | other

    def build_model(self) -> nn.Module:
        return self._build()

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        features, labels = zip(*samples, strict=True)
        return {"features": torch.stack(features), "labels": torch.stack(labels)}

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["features"]).float()
        return F.cross_entropy(logits, batch["labels"], reduction="sum", ignore_index=IGNORED)

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        logits = model(batch["features"]).float()
        loss = F.cross_entropy(logits, batch["labels"], reduction="sum", ignore_index=IGNORED)
        return Outputs(loss, self.count(batch), logits.argmax(-1), batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        return [{"label": label} for label in model(batch["features"]).argmax(-1).tolist()]

    def metrics(self) -> Mapping[str, Metric]:
        """As a user's own file may give them."""
        from torchmetrics.classification import MulticlassAccuracy  # takes seconds

        return {"accuracy": MulticlassAccuracy(CLASSES, average="micro", ignore_index=IGNORED)}

    @property
    def best_metric(self) -> BestMetric:
        return BestMetric(*self._other["best"])

    @property
    def splits_batches(self) -> bool:
        return bool(self._other["splits_batches"])

    @property
    def lengths(self) -> Sequence[int] | None:
        return self._other["lengths"]

    @property
    def facts(self) -> dict[str, Any]:
        return self._other["facts"]

    @property
    def warnings(self) -> Sequence[str]:
        return self._other["warnings"]

    def prediction_samples(self, path: str | None) -> Rows:  # noqa: ARG002  the contract's signature
        assert self.evaluation is not None
        return self.evaluation

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        (folder / "assets.txt").write_text(type(model).__name__)


def perceptron() -> nn.Module:
    """A fresh two-layer model, the same at every call."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, CLASSES))


def tiny_engine(
    workload: Workload,
    precision: str = "fp32",
    optimizer: Optimizer | None = None,
    *,
    config: EngineConfig | None = None,
    max_grad_norm: float | None = None,
    recompute: bool | Literal["selective"] = False,
    compile: bool = False,
    scaler: Scaler | None = None,
    devices: int = 1,
    device: str = "cpu",
    trains: bool = True,
) -> Engine:
    """Set up, among the ranks of this process's group; SGD at 0.1 unless an optimizer is given."""
    made = build_engine(
        config or Single(),
        EngineOptions(
            precision=PRECISIONS[precision],
            scaler=scaler or Scaler(),
            machine=CPU if device == "cpu" else detect(device),
            device=torch.device(device),
            devices=devices,
            max_grad_norm=max_grad_norm,
            recompute=recompute,
            compile=compile,
        ),
        Communicator(),
    )
    made.setup(workload, optimizer_factory(optimizer or Optimizer(name="sgd", lr=0.1)) if trains else None)
    return made
