"""Tests what is built for a training, and what for an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.single import SingleEngine
from drivetrain.errors import UserError
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import assemble

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "linear.py"


RAW = {"workload": {"type": "module", "path": str(EXAMPLE)}, "batch_size": 8, "loop": {"steps": 1}}


def test_freed_memory_is_kept_from_the_end_of_setting_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loading and quantising free goes back to the system: training asks for other sizes."""
    order: list[str] = []
    setup = SingleEngine.setup

    def noted(*given: Any) -> None:
        setup(*given)
        order.append("set up")

    monkeypatch.setattr(SingleEngine, "setup", noted)
    monkeypatch.setattr("drivetrain.training.assemble.keep_freed_blocks", lambda: order.append("kept"))
    run, _ = validate(RAW, [])
    assert run is not None
    assemble(run, detect("cpu"), Communicator(), training=True)
    assert order == ["set up", "kept"]


def test_an_evaluation_makes_no_optimizer() -> None:
    run, _ = validate(RAW, [])
    assert run is not None
    trains, evaluates = (assemble(run, detect("cpu"), Communicator(), training)[1] for training in (True, False))
    assert "optimizer" in trains.measured()["held_bytes"]
    assert evaluates.measured() == {}


def run_of(folder: Path, metric: str, *lines: str) -> RunConfig:
    """Returns a run of a file with these lines, whose metric decides."""
    file = folder / "task.py"
    file.write_text("\n".join(("import torch", "from torch import nn", "model = nn.Linear(2, 3)", *lines)))
    raw = {**RAW, "workload": {"type": "module", "path": str(file)}, "evaluation": {"metric": metric}}
    run, _ = validate(raw, [])
    assert run is not None
    return run


def test_a_metric_without_direction_is_reported_with_the_loss_that_is_refused(tmp_path: Path) -> None:
    lines = (
        "train_data = [(torch.zeros(2), torch.tensor(1))] * 9",
        "evaluation_data = train_data",
        "loss = nn.CrossEntropyLoss(weight=torch.ones(3))",
        "def recall(output, target): return 0.5",
        'metrics = {"recall": recall}',
    )
    with pytest.raises(UserError) as caught:
        assemble(run_of(tmp_path, "recall", *lines), detect("cpu"), Communicator(), training=True)
    whys = [found.why for found in caught.value.problems]
    assert len(whys) == 2
    assert "class weights" in whys[0]
    assert "recall does not state which direction is better" in whys[1]


def test_a_file_that_fails_again_when_its_metrics_are_read_keeps_its_first_error(tmp_path: Path) -> None:
    lines = (
        "def train_data(): raise FileNotFoundError('rows.bin')",
        "loss = nn.CrossEntropyLoss()",
        "def metrics(): raise RuntimeError('metrics')",
    )
    with pytest.raises(UserError, match=r"rows\.bin"):
        assemble(run_of(tmp_path, "far", *lines), detect("cpu"), Communicator(), training=True)
