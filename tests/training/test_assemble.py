"""What is built for a training, and what for an evaluation."""

from __future__ import annotations

from pathlib import Path

from drivetrain.config.load import validate
from drivetrain.distributed.communicator import Communicator
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import assemble

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "linear.py"


def test_an_evaluation_makes_no_optimizer() -> None:
    raw = {"workload": {"type": "module", "path": str(EXAMPLE)}, "batch_size": 8, "loop": {"steps": 1}}
    run, _ = validate(raw, [])
    assert run is not None
    trains, evaluates = (assemble(run, detect("cpu"), Communicator(), training)[1] for training in (True, False))
    assert "optimizer" in trains.measured()["held_bytes"]
    assert evaluates.measured() == {}
