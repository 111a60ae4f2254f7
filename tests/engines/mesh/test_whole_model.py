"""Tests where the whole model is while it is tried."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.engines.mesh.whole_model import placed


@pytest.mark.parametrize(("free", "where"), [(10_000, "cuda"), (1000, "cpu")])
def test_all_models_are_on_the_device_where_they_fit_together(
    free: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, beside, moves = nn.Linear(10, 10), nn.Linear(10, 10), []  # 440 bytes each
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2**30))
    monkeypatch.setattr(nn.Module, "to", lambda _, device: moves.append(torch.device(device).type))
    with placed(model, torch.device("cuda", 0), [beside]) as device:
        assert device.type == where
    assert moves == [where, where, "cpu", "cpu"]
