"""What a start does to the folder of an earlier one: nothing is lost before the new run has begun."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.test_start import losses, prepared, report

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Command) -> Path:
    monkeypatch.chdir(prepared(tmp_path))
    assert drivetrain("train", "run.yaml", "output=out", "--quiet")[0] == 0
    return tmp_path / "out"


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_overwriting_run_that_is_refused_leaves_the_earlier_one(trained: Path, drivetrain: Command) -> None:
    before = held(trained)
    again = ("train", "run.yaml", "output=out", "--overwrite", "--quiet")
    code, _, err = drivetrain(*again, "tracking.trackers=[progres]")
    assert code == 2
    assert "did you mean progress" in err
    assert held(trained) == before
    (trained.parent / "mine.py").write_text("class Mine:\n    def __init__(self, folder): raise KeyError('no server')")
    assert drivetrain(*again, "tracking.trackers=[mine.py:Mine]")[0] != 0
    assert held(trained) == before
    assert drivetrain(*again, "loop.steps=3")[0] == 0
    assert sorted(losses(trained)) == [1, 2, 3]
    assert not (trained / ".overwritten").exists()


def test_a_run_whose_checkpoints_are_away_is_not_begun_anew(trained: Path, drivetrain: Command) -> None:
    curve = losses(trained)
    away = (trained / "checkpoints").rename(trained.parent / "away")
    code, _, err = drivetrain("train", "run.yaml", "output=out", "--resume", "loop.steps=14")
    assert code == 2
    assert "the last checkpoint was of step 12" in err
    assert "holds none now put them back" in err
    assert losses(trained) == curve
    away.rename(trained / "checkpoints")
    assert drivetrain("train", "run.yaml", "output=out", "--resume", "loop.steps=14", "--quiet")[0] == 0
    assert sorted(losses(trained)) == [*range(1, 15)]


def test_resuming_a_finished_run_keeps_what_was_measured(trained: Path, drivetrain: Command) -> None:
    before = report(trained)
    assert before["samples_per_second"] > 0
    assert drivetrain("train", "run.yaml", "output=out", "--resume", "--quiet")[0] == 0
    assert report(trained) == before
    assert drivetrain("train", "run.yaml", "output=out", "--resume", "--quiet", "loop.steps=14")[0] == 0
    assert report(trained)["steps"] == 14
    told = {**report(trained), "status": "interrupted"}
    (trained / "report.json").write_text(json.dumps(told))
    assert drivetrain("train", "run.yaml", "output=out", "--resume", "--quiet", "loop.steps=14")[0] == 0
    assert report(trained)["status"] == "completed"


def test_the_best_by_another_metric_is_no_best(trained: Path, drivetrain: Command) -> None:
    _, _, err = drivetrain("train", "run.yaml", "output=out", "--resume", "loop.steps=18", "evaluation.metric=macro_f1")
    assert "chosen by loss so far, and is by macro_f1 from here on" in err
    assert report(trained)["best"]["metric"] == "macro_f1"
    manifest = json.loads((Path(report(trained)["best_checkpoint"]) / "manifest.json").read_text())
    assert manifest["facts"]["metric_name"] == "macro_f1"
