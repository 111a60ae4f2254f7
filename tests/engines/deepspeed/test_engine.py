"""The model as DeepSpeed gets it; its training is compared in tests/parity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.engines.deepspeed.engine import InAutocast


def test_the_model_computes_under_autocast_and_keeps_its_parameters() -> None:
    plain = nn.Linear(3, 2)
    wrapped, x = InAutocast(plain, lambda: torch.autocast("cpu", torch.bfloat16)), torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
    assert wrapped(x).dtype == torch.bfloat16
    assert torch.equal(wrapped(x), expected)
    assert all(mine is theirs for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True))


TWICE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import drivetrain

data = TensorDataset(torch.randn(32, 8), torch.randn(32, 2))
for engine in ("zero2", "zero3"):
    net = nn.Linear(8, 2)
    drivetrain.train(model=net, train_data=data, loss=nn.MSELoss(), engine=engine, batch_size=16, output=engine)
"""


@pytest.mark.long
def test_a_second_run_of_the_same_process_joins_groups_of_its_own(tmp_path: Path) -> None:
    """As in a notebook: DeepSpeed keeps the first run's for the life of the process."""
    (tmp_path / "twice.py").write_text(TWICE)
    done = subprocess.run(
        [sys.executable, "twice.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "zero3" / "report.json").exists()
