"""The curve of the Transformers Trainer: same model, same batches, its defaults on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import drivetrain
from drivetrain.data.order import GlobalOrder

SAMPLES, BATCH, EPOCHS, SEED, LR = 75, 16, 3, 5, 3e-3  # the last batch of an epoch has 11
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 2))


class WithLoss(nn.Module):
    """What the Trainer takes: a model that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": X[index], "labels": Y[index]}


class OurOrder(Sampler[int]):
    """The samples of one epoch after the other, in the order in which drivetrain takes them."""

    def __init__(self) -> None:
        self._step, self._order = 0, GlobalOrder(SAMPLES, BATCH, SEED)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._order.steps_per_epoch):
            _, rows = self._order.batch(self._step)
            self._step += 1
            yield from rows.tolist()


class InOurOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> OurOrder:
        return OurOrder()


class Curve(TrainerCallback):
    def __init__(self) -> None:
        self.points: list[tuple[float, float, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.points.append((logs["loss"], logs["grad_norm"], logs["learning_rate"]))


# the Trainer pins memory wherever it runs
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_losses_norms_rates_and_weights_are_those_of_the_trainer(tmp_path: Path) -> None:
    curve, theirs = Curve(), network()
    settings = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=LR,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    InOurOrder(WithLoss(theirs), settings, train_dataset=Rows(), callbacks=[curve]).train()

    ours = network()
    report = drivetrain.train(
        model=ours,
        train_data=TensorDataset(X, Y),
        loss=nn.CrossEntropyLoss(),
        batch_size=BATCH,
        loop={"epochs": EPOCHS, "max_grad_norm": 1.0},
        optimizer={"name": "adamw", "lr": LR},
        schedule={"name": "linear"},
        tracking={"log_every": 1},
        seed=SEED,
        device="cpu",
        output=tmp_path / "run",
        quiet=True,
    )
    found = report.curve()
    losses, norms, rates = zip(*curve.points, strict=True)
    assert len(losses) == 15
    assert found["loss"] == pytest.approx(losses, rel=1e-5)
    assert found["grad_norm"] == pytest.approx(norms, rel=1e-5)
    assert found["lr"] == pytest.approx(rates, rel=1e-9)
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
