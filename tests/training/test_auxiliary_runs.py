"""Runs with models beside the trained one: what a checkpoint holds of them, and a resume to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.checkpoint.run_state import verify

Run = Callable[..., tuple[int, str, str]]
TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
x = torch.randn(60, 4)
y = (x[:, 0] > 0).long()
train_data = evaluation_data = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
SCALE = 1.0
def teacher():
    made = nn.Linear(4, 2)
    nn.init.constant_(made.weight, SCALE)
    return made
auxiliary = {
    "teacher": teacher,
    "reference": {"role": "moved", "every": 2, "mixing": 0.25},
    "head": {"role": "trained", "model": lambda: nn.Linear(2, 1)},
}
def counts(batch):
    return {name: len(batch["target"]) for name in ("label", "near", "value")}
def statistics(model, batch):
    return {"sum": {"output": model(batch["input"]).sum(0)}}
def loss_terms(model, batch, auxiliary, statistics):
    output = model(batch["input"]) + 0.01 * statistics.sums["output"].tanh()
    others = auxiliary["teacher"](batch["input"]) + auxiliary["reference"](batch["input"])
    return {
        "label": F.cross_entropy(output, batch["target"], reduction="sum"),
        "near": (output - others).square().sum(),
        "value": (auxiliary["head"](output)[:, 0] - batch["target"]).square().sum(),
    }
"""


def trained(drivetrain: Run, *more: str) -> tuple[int, str]:
    cadence = ["loop.steps=8", "checkpoints.every_steps=3", "tracking.log_every=1", "batch_size=12"]
    given = ["workload={type: module, path: task.py}", *cadence, "micro_batch_size=5", "optimizer.name=adamw"]
    Path("run.yaml").write_text("{}")
    code, _, words = drivetrain("train", "run.yaml", *given, "--quiet", *more)
    return code, words


def points(folder: str) -> list[tuple[float, ...]]:
    events = map(json.loads, Path(folder, "events.jsonl").read_text().splitlines())
    return [(e["step"], e["loss"], e["grad_norm"], *e["terms"].values()) for e in events if e["event"] == "step"]


def test_a_run_that_was_cut_off_goes_on_to_the_bit_and_beside_no_other_teacher(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(TASK)
    assert trained(drivetrain, "output=whole", "checkpoints.keep_last=9") == (0, "")
    shutil.copytree("whole", "cut")
    for step in (6, 8):
        shutil.rmtree(f"cut/checkpoints/step-{step:08d}")
    assert trained(drivetrain, "output=cut", "checkpoints.keep_last=9", "--resume")[0] == 0
    assert points("cut") == points("whole")
    whole, cut = (Path(name, "checkpoints", "step-00000008") for name in ("whole", "cut"))
    for name in ("model", "auxiliary", "optimizer"):
        assert (whole / f"{name}.safetensors").read_bytes() == (cut / f"{name}.safetensors").read_bytes()
    assert verify(cut) == []
    report = json.loads(Path("cut", "report.json").read_text())
    assert report["terms"].keys() == {"label", "near", "value"}
    Path("task.py").write_text(TASK.replace("SCALE = 1.0", "SCALE = 2.0"))
    code, words = trained(drivetrain, "output=cut", "checkpoints.keep_last=9", "loop.steps=9", "--resume")
    assert code == 2
    assert "teacher (task.py:teacher) has other weights than when the checkpoint was made" in " ".join(words.split())


def test_a_checkpoint_of_a_run_without_auxiliary_models_says_nothing_of_them(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = TASK.index("auxiliary = {")
    Path("task.py").write_text(TASK[:start] + "loss = nn.CrossEntropyLoss()\n")
    assert trained(drivetrain, "output=plain") == (0, "")
    folder = Path("plain", "checkpoints", "step-00000008")
    assert not (folder / "auxiliary.json").exists()
    assert "beside" not in json.loads((folder / "training.json").read_text())
    events = [json.loads(line) for line in Path("plain", "events.jsonl").read_text().splitlines()]
    assert not any("terms" in event for event in events), "files are as they were before"
