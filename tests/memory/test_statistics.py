"""BatchNorm's statistics are as they were before a window that does not count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drivetrain.memory.statistics import Statistics


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def held(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("refused", [True, torch.tensor(True)])
def test_what_a_bad_window_made_of_them_is_taken_back(refused: bool | Tensor) -> None:
    model = normed()
    statistics = Statistics(model)
    model(torch.randn(6, 4))  # no longer those of the start
    before = held(model)
    statistics.keep()
    model(torch.full((6, 4), torch.nan))
    model(torch.randn(6, 4))
    assert any(buffer.isnan().any() for buffer in model.buffers())
    statistics.put_back(refused)
    assert all(map(torch.equal, model.buffers(), before))


@pytest.mark.parametrize("refused", [False, torch.tensor(False)])
def test_what_a_good_window_made_of_them_stays(refused: bool | Tensor) -> None:
    model = normed()
    statistics = Statistics(model)
    statistics.keep()
    model(torch.randn(6, 4))
    after = held(model)
    statistics.put_back(refused)
    assert all(map(torch.equal, model.buffers(), after))


def test_a_model_without_any_costs_nothing() -> None:
    statistics = Statistics(nn.Linear(2, 2))
    assert not statistics
    statistics.keep()
    statistics.put_back()
