"""A rank whose launching process is gone ends in one line: what its errors say of others and of files is no news."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drivetrain.config.load import load
from drivetrain.launch.job import Job
from drivetrain.launch.rank import _fitted
from drivetrain.plan.machines import cluster
from tests.launch.chaos import ranks_of
from tests.launch.test_start import command, prepared, wait_for_step

ENVIRONMENT = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
LINE = "rank 1 ends: the process that started it is gone"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rank_that_outlives_its_launcher_ends_in_one_line(tmp_path: Path, is_there: bool) -> None:
    """Its own failure (there is no task) and the look after its parent race; the folder may be gone already."""
    folder = tmp_path / "launch"
    if is_there:
        folder.mkdir()
    words = [sys.executable, "-m", "drivetrain.launch.rank", str(folder), "1"]
    done = subprocess.run(words, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [LINE]
    assert not folder.exists()


def test_a_rank_whose_words_are_read_by_no_process_ends_too(tmp_path: Path) -> None:
    """The launcher's terminal or pipe may be gone with it."""
    words = [sys.executable, "-m", "drivetrain.launch.rank", str(tmp_path / "launch"), "1"]
    rank = subprocess.Popen(words, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE)
    assert rank.stderr is not None
    rank.stderr.close()
    try:
        assert rank.wait(60) == 1
    finally:
        rank.kill()


def test_a_rank_that_cannot_say_how_it_ended_says_it_in_its_last_line(tmp_path: Path) -> None:
    """Its parent reads that line: the disk of the launch's folder may be full."""
    words = [sys.executable, "-m", "drivetrain.launch.rank", str(tmp_path / "gone"), str(os.getpid())]
    done = subprocess.run(words, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, "of what failed first"
    last = done.stderr.splitlines()[-1]
    assert "gone cannot be written: No such file or directory; FileNotFoundError" in last


@pytest.mark.long
def test_ranks_that_lose_their_launcher_and_a_peer_leave_no_traceback(tmp_path: Path) -> None:
    folder = prepared(tmp_path, "time.sleep(0.05)")
    with (tmp_path / "said").open("wb") as reported:
        launcher = subprocess.Popen(
            command("train", "run.yaml", "engine=ddp", "processes=2", "loop.steps=1000", "output=run"),
            cwd=folder, stdout=reported, stderr=reported,
        )  # fmt: skip
    try:
        wait_for_step(folder / "run" / "events.jsonl", 3)
        found = {rank.environ()["RANK"]: rank for rank in ranks_of(launcher.pid)}
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        os.kill(found["1"].pid, signal.SIGKILL)
        _, alive = psutil.wait_procs([found["0"]], timeout=30)
        assert not alive
    finally:
        launcher.kill()
        launcher.wait()
    time.sleep(0.1)
    text = (tmp_path / "said").read_text()
    assert "Traceback" not in text
    assert text.count("ends: the process that started it is gone") == 1


def test_a_node_with_all_its_gpus_goes_on_with_one_that_lost_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    monkeypatch.setattr("drivetrain.runtime.hardware.detect", lambda _: cluster("8xH100-80GB").host)
    run, problems = load(tmp_path / "run.yaml", ["engine=ddp", "processes=8", "nodes=2", "batch_size=16"])
    assert run is not None, problems
    task = _fitted(Job(verb="train", run=run), 15)
    assert task.run.world_size == 15
    assert task.notices == ["15 of 16 ranks are there; the global batch stays 16"]
