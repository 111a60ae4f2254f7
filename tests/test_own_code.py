"""docs/how-to/own-code.md, followed from an empty folder."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drivetrain.cli import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "own-code.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files."""
    for _, name, text in re.findall(r"```(python|yaml)\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    assert ended.value.code == 0, command


def test_the_pages_commands_train_by_its_loss_metric_and_schedule(folder: Path) -> None:
    commands = [line for line in PAGE.read_text().splitlines() if line.startswith("drivetrain ")]
    assert len(commands) == 3
    for command in commands:
        typed(command)
    has_several_terms(folder / "runs" / "my_terms")
    report = json.loads((folder / "runs" / "my_run" / "report.json").read_text())
    assert report["best"]["metric"] == "recall"
    assert report["metrics"]["recall"] > 0.8
    events = map(json.loads, (folder / "runs" / "my_run" / "events.jsonl").read_text().splitlines())
    rates = [event["lr"] for event in events if event["event"] == "step"]
    assert rates[0] > rates[5]  # 12 points of 10 steps; two cycles of 60
    assert rates[6] > rates[5]
    rows = list(csv.DictReader((folder / "my_predictions.csv").read_text().splitlines()))
    assert len(rows) == 200
    assert {row["prediction"] for row in rows} == {"0", "1"}
    assert set(rows[0]) == {"sample", "prediction", "probability", "probabilities.0", "probabilities.1"}


def has_several_terms(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    assert report["metrics"]["accuracy"] > 0.9
    assert report["metrics"].keys() == {"loss", "loss_label", "loss_teacher", "accuracy"}
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    points = [event for event in events if event["event"] == "step"]
    for point in points:
        assert point["loss"] == pytest.approx(point["terms"]["label"] + 0.5 * point["terms"]["teacher"], rel=1e-5)
    assert report["terms"] == points[-1]["terms"]


def test_the_pages_pictures_are_trained_with_their_table(folder: Path) -> None:
    (folder / "pictures").mkdir()
    lines = ["filename,label"]
    for number in range(40):
        label = ("cat", "dog")[number % 2]
        grey = np.full((16, 16), 40 if label == "cat" else 200, np.uint8)
        Image.fromarray(grey).save(folder / "pictures" / f"{number:04}.png")
        lines.append(f"{number:04}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(lines))
    typed("drivetrain train pictures.yaml --quiet workload.loss.class_weights=balanced")
    typed("drivetrain predict pictures.yaml --data pictures/0003.png --output one.jsonl")
    (row,) = map(json.loads, (folder / "one.jsonl").read_text().splitlines())
    assert row["sample"] == "pictures/0003.png"
    assert row["probabilities"].keys() == {"cat", "dog"}
    assert (folder / "runs" / "pictures" / "last" / "model.safetensors").exists()
