"""The optimizer's state on a disk: the same curve, exact resuming, nothing left. Slow: DeepSpeed compiles once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.launch.test_start import finished, losses

NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
train_data = TensorDataset(torch.randn(64, 1024, generator=generator), torch.arange(64) % 10)
loss = nn.CrossEntropyLoss()


def build_model():  # partitions above 1 MiB: DeepSpeed keeps smaller ones in memory
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    run = {
        "workload": {"type": "module", "path": "net.py"},
        "engine": {"name": "deepspeed", "stage": 3, "offload_optimizer": "nvme", "nvme_path": str(tmp_path / "disk")},
        "processes": 2,
        "batch_size": 16,
        "loop": {"steps": 6, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1.0e-3},
        "tracking": {"log_every": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="libaio's headers are not installed")
def test_state_on_a_disk_trains_the_same_resumes_exactly_and_leaves_nothing(place: Path) -> None:
    finished(place, "train", "run.yaml", "engine.offload_optimizer=none", "output=memory")
    finished(place, "train", "run.yaml", "output=disk-run", timeout=1800)  # compiles, if it is the first
    assert losses(place / "disk-run") == pytest.approx(losses(place / "memory"), rel=1e-6)
    finished(place, "train", "run.yaml", "output=parts", "loop.steps=4")
    finished(place, "train", "run.yaml", "output=parts", "--resume")
    assert losses(place / "parts")[6] == losses(place / "disk-run")[6]
    assert not list((place / "disk").iterdir())
