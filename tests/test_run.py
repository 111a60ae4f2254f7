"""What a start does to the folder of an earlier one: nothing is lost before the new run has begun."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.tracking.jsonl import read_events
from tests.launch.test_start import losses, prepared, report

Command = Callable[..., tuple[int, str, str]]
LINEAR = "schedule={name: linear, warmup_steps: 2}"


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


def test_a_run_that_ended_early_trains_no_more_until_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Command
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    train = ("train", "run.yaml", "output=out", "evaluation.every_steps=2")
    stopping = "evaluation.early_stopping={patience: 1, min_delta: 100}"
    assert drivetrain(*train, stopping)[0] == 0
    out = tmp_path / "out"
    before, curve = report(out), losses(out)
    assert (before["status"], before["steps"]) == ("stopped_early", 4)
    code, _, err = drivetrain(*train, stopping, "--resume")
    assert code == 0
    assert "stopped early at step 4, 1 evaluations without a gain; newest checkpoint" in err
    assert "nothing was left to train: a larger evaluation.early_stopping.patience goes on" in err
    assert report(out) == before
    assert losses(out) == curve
    assert drivetrain(*train, stopping.replace("1,", "3,"), "--resume")[0] == 0
    assert (report(out)["status"], report(out)["steps"]) == ("stopped_early", 8)
    assert drivetrain(*train, "--resume")[0] == 0
    assert (report(out)["status"], report(out)["steps"]) == ("completed", 12)
    measured = report(out)["samples_per_second"]
    _, _, err = drivetrain(*train, "loop.steps=12", stopping, "--resume")
    assert "completed at step 12; newest checkpoint" in err
    assert report(out)["samples_per_second"] == measured


def test_skipped_steps_are_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Command
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    scaled = ("precision=fp16-mixed", "scaler={init_scale: 1.0e+9, backoff_factor: 0.01}", LINEAR)
    code, _, err = drivetrain("train", "run.yaml", "output=out", *scaled)
    assert code == 0
    skipped = report(tmp_path / "out")["skipped_steps"]
    assert 1 < skipped < 9
    assert f"completed at step 12 ({skipped} skipped, so {12 - skipped} updates)" in err
    points = [e for e in read_events(tmp_path / "out" / "events.jsonl") if e["event"] == "step"]
    assert all(isinstance(point["grad_norm"], float) for point in points)
    assert not math.isfinite(points[0]["grad_norm"])
    # one part of the way is left, of as many as there are updates after the warm-up: the line reaches 0 after the last
    assert points[-1]["lr"] == pytest.approx(0.1 / (12 - skipped - 2))


def test_evaluate_takes_the_best_that_is_there_and_says_if_another_was_better(
    trained: Path, drivetrain: Command, caplog: pytest.LogCaptureFixture
) -> None:
    best = trained.parent / report(trained)["best_checkpoint"]
    assert best.name == f"step-{report(trained)['best']['step']:08d}" == "step-00000012"
    code, out, _ = drivetrain("evaluate", "run.yaml", "output=out")
    assert code == 0
    assert json.loads(out)["checkpoint"].endswith("step-00000012")
    assert not caplog.messages
    content = bytearray((best / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (best / "model.safetensors").write_bytes(content)
    code, out, err = drivetrain("evaluate", "run.yaml", "output=out")
    assert code == 0
    assert json.loads(out)["checkpoint"].endswith("step-00000006")
    said = " ".join((*caplog.messages, err))
    assert "at step 12) has no good checkpoint: taking out/checkpoints/step-00000006" in said
