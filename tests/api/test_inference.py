"""drivetrain.predict and drivetrain.evaluate: what they take, and what of the caller's they leave alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain.api.inference import _begun
from drivetrain.config.precision import PRECISIONS
from drivetrain.errors import UserError
from drivetrain.runtime.hardware import detect

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


@pytest.mark.parametrize("data", ["data.csv", b"data", {"x": [1.0, 2.0]}, DataLoader(TensorDataset(X, Y)), 3])
def test_what_holds_no_samples_is_refused(data: Any) -> None:
    with pytest.raises(UserError, match="was given"):
        drivetrain.predict(nn.Linear(4, 2), data)


def test_inputs_get_the_dtype_of_the_model() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        net = nn.Linear(4, 1).to(dtype)
        found = [row["prediction"] for row in drivetrain.predict(net, X[:3])]
        assert found == pytest.approx(net(X[:3].to(dtype)).flatten().tolist())
    assert len(list(drivetrain.predict(nn.Linear(4, 1), X[:3].double()))) == 3


def test_each_module_gets_its_own_mode_back() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[0].eval()
    rows = drivetrain.predict(net, X)
    next(rows)
    assert not net.training
    list(rows)
    assert (net.training, net[0].training, net[1].training) == (True, False, True)


def test_between_rows_the_callers_generators_and_switches_stand() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        torch.manual_seed(1)
        random.seed(1)
        torch.use_deterministic_algorithms(True)
        for number in range(2):
            switches = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
            yield {"sample": number, "switches": switches}

    run = cast(Any, SimpleNamespace(precision_spec=PRECISIONS["tf32"], deterministic=True))
    before = torch.get_rng_state(), random.getstate(), torch.get_float32_matmul_precision()
    found = _begun(rows(), run, detect())
    for number in range(2):
        assert next(found) == {"sample": number, "switches": ("high", True)}
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert torch.get_float32_matmul_precision() == before[2]
        assert not torch.are_deterministic_algorithms_enabled()


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["target"], reduction="sum")


def count(batch: dict[str, Tensor]) -> int:
    return len(batch["target"])


def test_a_run_of_a_summed_loss_is_evaluated_with_it_and_predicts_by_its_model(tmp_path: Path) -> None:
    net, data = nn.Linear(4, 2), TensorDataset(X, Y)
    objects: dict[str, Any] = {"loss_sum": loss_sum, "count": count, "evaluation_data": data}
    drivetrain.train(
        model=net,
        train_data=data,
        **objects,
        output=tmp_path / "run",
        batch_size=20,
        lr=0.5,
        optimizer="sgd",
        quiet=True,
    )
    found = drivetrain.evaluate(tmp_path / "run", "last", model=nn.Linear(4, 2), **objects)
    assert found["metrics"]["loss"] == pytest.approx(F.cross_entropy(net(X), Y).item(), rel=1e-5)
    with pytest.raises(UserError, match=r"drivetrain\.predict\(drivetrain\.load\(folder, model=net\), data\)"):
        drivetrain.predict(tmp_path / "run", data)
