"""What was imported trains: two steps of the digits recipe under the imported engine, batch, optimizer and schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.importing.made import FOLDER

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "digits.yaml"
SHORT = [
    *("loop.epochs=null", "loop.steps=2", "output=run", "checkpoints.every_steps=null"),
    *("evaluation.every_steps=null", "limit_train=64", "limit_evaluation=40"),
]


@pytest.mark.parametrize(
    ("file", "engine", "precision", "batch"),
    [
        ("accelerate/fsdp1_by_size.yaml", "fsdp", "fp32", 64),
        ("llama_factory/qwen_lora_sft.yaml", "single", "bf16-mixed", 16),
        ("training_arguments/short.json", "single", "fp32", 16),
    ],
)
def test_an_imported_run_trains(
    file: str,
    engine: str,
    precision: str,
    batch: int,
    drivetrain: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, told = drivetrain("import", str(FOLDER / file), "--onto", str(RECIPE), "--output", "new.yaml")
    assert code == 0, told
    code, _, told = drivetrain("train", "new.yaml", *SHORT, "--quiet")
    assert code == 0, told
    report = json.loads(Path("run/report.json").read_text())
    assert report["status"] == "completed"
    assert (report["engine"], report["precision"], report["steps"]) == (engine, precision, 2)
    assert report["samples"] == 2 * batch
    assert len(report["ranks"]) == (2 if engine == "fsdp" else 1)
