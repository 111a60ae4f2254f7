"""Tests what a start does to the folder of an earlier one: nothing is lost before the new run has begun."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import RunError
from drivetrain.runtime import storage
from drivetrain.runtime.attempt import Attempt
from drivetrain.tracking import jsonl
from drivetrain.tracking.build import EventStream, build_trackers
from drivetrain.tracking.events import StepDone
from drivetrain.tracking.jsonl import read_events
from drivetrain.training import run
from drivetrain.training.progress import Progress
from drivetrain.training.run_report import effective
from tests.launch.test_start import finished, losses, prepared, report
from tests.ranks import RankPool

Command = Callable[..., tuple[int, str, str]]
LINEAR = "schedule={name: linear, warmup_steps: 2}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepared(tmp_path_factory.mktemp("made"))
    finished(folder, "train", "run.yaml", "output=out", "--quiet")
    return folder


@pytest.fixture
def trained(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of twelve steps, as `out` of the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_point_of_the_curve_has_a_rate_the_first_too(trained: Path) -> None:
    rates = [each["samples_per_second"] for each in read_events(trained / jsonl.FILE_NAME) if each["event"] == "step"]
    assert len(rates) == 12
    assert min(rates) > 0


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
    assert (before["first_step"], report(trained)["first_step"], report(trained)["steps"]) == (0, 12, 14)
    words = {**report(trained), "status": "interrupted"}
    (trained / "report.json").write_text(json.dumps(words))
    assert drivetrain("train", "run.yaml", "output=out", "--resume", "--quiet", "loop.steps=14")[0] == 0
    assert report(trained)["status"] == "completed"


def test_a_run_that_is_past_the_steps_it_is_asked_for_says_so_and_stays_as_it_is(
    trained: Path, drivetrain: Command
) -> None:
    before = held(trained)
    code, out, err = drivetrain("train", "run.yaml", "output=out", "--resume", "loop.steps=5")
    assert code == 2
    assert "loop.steps: the run is at step 12 already, beyond 5: nothing was trained" in err
    assert "completed" not in out, "no report, which would pass for a new one"
    code, _, err = drivetrain("train", "run.yaml", "output=out", "--resume", "loop.steps=null", "loop.epochs=1")
    assert code == 2
    assert "loop.epochs: the run is at step 12 already, beyond 6: nothing was trained" in err
    changed = {name for name, content in held(trained).items() if before.get(name) != content}
    assert changed == {"events.jsonl"}, "which holds both refusals"
    assert drivetrain("train", "run.yaml", "output=out", "--resume", "--quiet", "loop.steps=13")[0] == 0


ODD = (b"17", b"null", b'{"step": null}', b'{"event": "step"}', b"\xff\x00", b'{"event": "che')


def test_odd_lines_in_the_record_keep_no_verb_from_its_work(trained: Path, drivetrain: Command) -> None:
    events = trained / "events.jsonl"
    first = len(events.read_bytes().splitlines()) + 1
    with events.open("ab") as file:
        file.write(b"\n".join(ODD) + b"\n")
    code, _, err = drivetrain("train", "run.yaml", "output=out", "--resume", "loop.steps=14")
    assert code == 0, err
    numbers = ", ".join(str(first + n) for n in range(5))
    assert err.count(f"out/events.jsonl: lines {numbers} and 1 more of it are no events of a run") == 1
    assert sorted(losses(trained)) == [*range(1, 15)]
    assert [events.read_bytes().split(b"\n").count(odd) for odd in ODD] == [1] * len(ODD), "they stay"
    (trained / "checkpoints").rename(trained.parent / "away")
    code, _, err = drivetrain("train", "run.yaml", "output=out", "--resume", "loop.steps=16")
    assert (code, "the last checkpoint was of step 14" in err) == (2, True), err
    assert drivetrain("report", "out")[0] == 0


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_of_the_run_that_cannot_be_written_is_reported_and_what_was_there_stays(
    trained: Path, drivetrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace
    for name in ("run.yaml", "environment.json", "report.json", "events.jsonl"):
        before = (trained / name).read_bytes()

        def full(path: Path, target: Path, name: str = name) -> Path:
            if path.name.startswith(f".{name}"):
                raise FULL
            return replace(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", full)
            code, _, err = drivetrain("train", "run.yaml", "output=out", "--resume", "--quiet", "loop.steps=14")
        assert code == 1
        assert f"out/{name} cannot be written: No space left on device; make room, then go on with --resume" in err
        assert (trained / name).read_bytes().startswith(before)
        assert not list(trained.glob(".*.partial-*"))
    assert drivetrain("train", "run.yaml", "output=out", "--resume", "--quiet", "loop.steps=15")[0] == 0
    assert sorted(losses(trained)) == [*range(1, 16)]


@pytest.mark.usefixtures("trained")
def test_a_disk_that_is_full_for_the_record_too_does_not_hide_what_failed_first(
    drivetrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = jsonl._append

    def full(*_: object) -> None:
        raise FULL

    def full_at_the_end(path: Path, lines: list[dict[str, Any]]) -> None:
        if lines[0]["event"] == "run_finished":
            raise RunError("events.jsonl cannot be written")
        append(path, lines)

    monkeypatch.setattr(storage, "publish", full)
    monkeypatch.setattr(jsonl, "_append", full_at_the_end)
    code, _, err = drivetrain("train", "run.yaml", "output=out", "--resume", "--quiet", "loop.steps=14")
    assert code == 1
    assert "the checkpoint of step 14 could not be saved" in err
    assert "The last good checkpoint is" in err


GONE = """
if Model.steps == 8:
    import pathlib, shutil
    HOW
"""
HOWS = {
    "deleted": "shutil.rmtree('out')",
    "moved": "pathlib.Path('out').rename('elsewhere')",
    "replaced": "pathlib.Path('out').rename('elsewhere'); shutil.copytree('elsewhere', 'out')",
}


@pytest.mark.parametrize(("how", "every"), [("deleted", 1000), ("moved", 1), ("replaced", 1), ("replaced", 1000)])
def test_a_run_whose_folder_is_gone_ends_at_the_next_point_of_its_curve_or_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Command, how: str, every: int
) -> None:
    """And writes nothing more at the old path, where another run may be by now."""
    hook = GONE.replace("HOW", HOWS[how]).strip().replace("\n", "\n            ")
    monkeypatch.chdir(prepared(tmp_path, hook))
    seldom = ("checkpoints.every_steps=20", "evaluation.every_steps=1000", f"tracking.log_every={every}")
    code, _, err = drivetrain("train", "run.yaml", "output=out", "--quiet", "loop.steps=1000", *seldom)
    assert code == 1
    assert "out is no longer the folder that this run began in" in err
    assert "if it was deleted, start anew" in err
    if how != "replaced":
        assert not (tmp_path / "out").exists()
    else:
        assert held(tmp_path / "out") == held(tmp_path / "elsewhere")
    if how != "deleted":
        last = 7 if every == 1 else 0
        assert max(losses(tmp_path / "elsewhere"), default=0) == last


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


def test_skipped_steps_are_reported_at_the_end(
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
    reported = " ".join((*caplog.messages, err))
    assert "at step 12) has no good checkpoint: taking out/checkpoints/step-00000006" in reported


def ended_together(out: Path) -> list[str]:
    """Returns what each rank hears of a point of the curve, before and after the folder is gone, and of a save."""
    ranks = Communicator()
    events = EventStream(build_trackers([], out), out) if ranks.is_first else EventStream([])
    saves: list[Progress] = []
    parts: Any = SimpleNamespace(ranks=ranks, events=events)
    checkpoints: Any = SimpleNamespace(save=saves.append)
    point = StepDone(1, 0.5, 1.0, 1.0, 1e-3, None, 0, 10, 5.0, 2.0)
    run._send(parts, point)
    run._save(parts, checkpoints, Progress())
    ranks.on_first(lambda: shutil.rmtree(out))
    heard = []
    for do in (
        functools.partial(run._send, parts, point),
        functools.partial(run._save, parts, checkpoints, Progress()),
    ):
        try:
            do()
        except RunError as error:
            heard.append(str(error))
    return [*heard, str(len(saves))]


def test_all_ranks_hear_that_the_folder_is_gone(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    first, second = ranks(2).run(ended_together, tmp_path / "out")
    assert first == second
    assert ["no longer the folder that this run began in" in each for each in first] == [True, True, False]
    assert first[-1] == "1", "nothing is saved after it"
    assert not (tmp_path / "out").exists()


def test_a_clock_that_is_set_while_a_run_trains_is_in_none_of_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Command
) -> None:
    """A day back each time that the time of day is asked for."""
    now, days = time.time(), itertools.count(1)
    monkeypatch.chdir(prepared(tmp_path, "time.sleep(0.02)"))
    monkeypatch.setattr("time.time", lambda: now - 86400 * next(days))
    assert drivetrain("train", "run.yaml", "output=out", "--quiet")[0] == 0
    found = report(tmp_path / "out")
    assert 12 * 0.02 < found["seconds"] < 600
    assert 0.05 < found["effective_share"] < 0.9999, "it was started before its first step"
    assert all(seconds >= 0 for seconds in found["seconds_by_part"].values())


def test_restarts_are_those_of_the_machine_that_was_there_longest() -> None:
    """The first rank may be on one that was lost and came back, which has seen the last restart alone."""
    mine = Attempt(since=time.monotonic() - 10, restarts=["the third"])
    others = (100.0, ["the first", "the second", "the third"], 0.0)
    parts: Any = SimpleNamespace(attempt=mine, ranks=SimpleNamespace(all_gather=lambda own: [own, others]))
    assert effective(parts, 60.0, 50.0) == {"restarts": others[1], "effective_share": 0.6}


def test_a_long_evaluation_says_how_far_it_is_and_the_record_is_the_same(
    trained: Path, drivetrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.training.evaluation.Shown.EVERY", 0.0)  # seconds
    monkeypatch.setattr("drivetrain.tracking.progress.PLAIN_LINE_SECONDS", 0.0)
    code, _, err = drivetrain("train", "run.yaml", "output=again")
    assert code == 0
    assert [each in err for each in ("evaluating 8 of 20 samples", "evaluating 20 of 20 samples")] == [True, True]
    kinds = [[event["event"] for event in read_events(folder / "events.jsonl")] for folder in (trained, Path("again"))]
    assert kinds[0] == kinds[1]
