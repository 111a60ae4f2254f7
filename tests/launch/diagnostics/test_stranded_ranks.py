"""Ranks that wait for a peer which failed, and do not notice, are ended soon; its error is what the user reads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint import tensor_file
from drivetrain.errors import RankError
from drivetrain.launch.diagnostics import stranded_ranks
from drivetrain.launch.diagnostics.process_state import Standing, standing
from drivetrain.launch.diagnostics.stack_request import pulses
from drivetrain.launch.diagnostics.stranded_ranks import STILL_SECONDS, Stranded
from drivetrain.launch.elastic import Died, result_of
from drivetrain.launch.job import Result
from drivetrain.launch.outcome import done, failed, outcomes
from drivetrain.runtime.heartbeat import WORKING, Pulse
from tests.launch.diagnostics.test_hang_report import STANDING
from tests.launch.test_start import command, prepared

TORCHS_SECONDS = 30  # after which torch's launcher kills what has not ended
# as a rank that waits in NCCL: a signal's handler does not run, and no connection breaks
STUCK = """
            if Model.steps == 3:
                if os.environ.get("RANK") == "1":
                    open("failed-at", "w").write(str(time.monotonic()))
                    raise ValueError("this one broke")
                while True:
                    time.sleep(1)"""


@pytest.mark.long
def test_a_rank_that_waits_for_ever_is_ended_soon_after_its_peer_fails(tmp_path: Path) -> None:
    folder = prepared(tmp_path, f"pass{STUCK}")
    words = command("train", "run.yaml", "engine=ddp", "processes=2", "output=run")
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    since = time.monotonic() - float((folder / "failed-at").read_text())
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("rank 1: ValueError: this one broke") == 1
    assert ended.stderr.count("Traceback") == 1
    assert since < TORCHS_SECONDS - STILL_SECONDS


class Meeting:
    """Stands for a meeting of several nodes: `failed` is what another tells."""

    def __init__(self, failed: str) -> None:
        self.reported, self._failed = list[str](), failed

    def tell_failure(self, rank: str) -> None:
        self.reported.append(rank)

    def failure(self) -> str:
        return self._failed


def watching(folder: Path, failed: str = "") -> tuple[Stranded, Meeting]:
    meeting: Any = Meeting(failed)
    return Stranded(folder, meeting), meeting


@pytest.fixture(params=["sleeping", "holding", "stopped"])
def stuck(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 0 of this folder: in a call that lets Python's lock go, in one that holds it, or stopped by a signal."""
    (tmp_path / "astray.py").write_text(STANDING)
    process = subprocess.Popen([sys.executable, str(tmp_path / "astray.py"), str(tmp_path), request.param])
    until = time.monotonic() + 60
    while not pulses(tmp_path) or not pulses(tmp_path)[0].step:
        assert time.monotonic() < until
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def test_a_rank_is_ended_once_it_has_stood_still_however_it_waits(
    tmp_path: Path, stuck: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.launch.diagnostics.stack_request.ANSWER_SECONDS", 2.0)
    failed(1, ValueError("broken"), "Traceback").write(tmp_path)
    peers, meeting = watching(tmp_path)
    name, now = peers.failed(outcomes(tmp_path)), time.monotonic()
    assert name == "rank 1"
    assert meeting.reported == ["rank 1"], "other nodes hear of it"
    running = pulses(tmp_path)
    for seconds in (0.0, STILL_SECONDS - 0.1):
        peers.look(now + seconds, running, name)
        assert stuck.poll() is None
    peers.look(now + STILL_SECONDS, running, name)
    assert stuck.wait(10) == -9
    left, cause = outcomes(tmp_path)
    assert (left.rank, left.lost) == (0, True)
    assert left.message == "ended because rank 1 failed, which it waited for"
    with pytest.raises(RankError, match="rank 1: ValueError: broken") as raised:
        result_of(tmp_path, {})
    assert raised.value.traceback == cause.traceback, "of the rank that failed"


def test_a_rank_that_goes_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = kills(monkeypatch)
    peers, _ = watching(tmp_path)
    for seconds in range(20):
        pulse = replace(PULSE, moves=seconds)
        peers.look(float(seconds), {0: pulse}, "rank 1")
    assert killed == []
    for seconds in range(20, 24):
        peers.look(float(seconds), {0: pulse}, "rank 1")
    assert killed == [], "it may notice by itself"
    peers.look(24.0, {0: pulse}, "rank 1")
    assert killed == [0]


def test_a_rank_that_writes_a_checkpoint_on_its_own_is_left_to_finish_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = kills(monkeypatch)
    answers = {0: Standing(writes=True)}
    monkeypatch.setattr(stranded_ranks, "ask", lambda *_: answers)
    peers, _ = watching(tmp_path)
    for seconds in range(20):
        peers.look(float(seconds), {0: PULSE}, "rank 1")
    assert killed == []
    answers[0] = Standing(call="all_reduce")
    peers.look(20.0, {0: PULSE}, "rank 1")
    assert killed == [0]


PULSE = Pulse(os.getpid(), 0, 9, 0.0, 7, 12, "backward", (), 0)


def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that would have been killed, in place of killing them."""
    killed: list[int] = []
    monkeypatch.setattr(stranded_ranks, "kill", lambda ranks: killed.extend(pulse.rank for pulse in ranks))
    monkeypatch.setattr(stranded_ranks, "ask", lambda *_: {})
    monkeypatch.setattr(stranded_ranks, "_leave", lambda *_: None)
    return killed


def test_what_a_rank_reported_itself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have met an error of its own in the moment before."""
    monkeypatch.setattr(stranded_ranks, "kill", lambda _: failed(0, ValueError("its own"), "").write(tmp_path))
    monkeypatch.setattr(stranded_ranks, "ask", lambda *_: {})
    monkeypatch.setattr(stranded_ranks, "state_of", lambda _: "gone")
    peers, _ = watching(tmp_path)
    for seconds in (0.0, STILL_SECONDS):
        peers.look(seconds, {0: PULSE}, "rank 1")
    assert [outcome.message for outcome in outcomes(tmp_path)] == ["ValueError: its own"]


def test_ranks_that_wait_for_another_machines_rank_are_ended_as_those_that_lost_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stranded_ranks, "kill", lambda _: None)
    monkeypatch.setattr(stranded_ranks, "ask", lambda *_: {})
    monkeypatch.setattr(stranded_ranks, "DYING_SECONDS", 0.0)
    assert watching(tmp_path)[0].failed([done(1, Result(code=0, value=None))]) == ""
    peers, meeting = watching(tmp_path, failed="rank 2")
    name = peers.failed([done(1, Result(code=0, value=None))])
    assert name == "rank 2"
    assert meeting.reported == []
    for seconds in (0.0, STILL_SECONDS):
        peers.look(seconds, {0: PULSE}, name)
    with pytest.raises(Died, match="rank 0: ended because rank 2 failed, which it waited for"):
        result_of(tmp_path, {})


def write_file(folder: Path) -> None:
    """Writes a checkpoint's file of no tensors, and flushes it to the disk."""
    layout, file = tensor_file.lay_out({}), folder / str(len(list(folder.iterdir())))
    tensor_file.create(file, layout)
    tensor_file.fill(file, layout, {})


@pytest.mark.parametrize("thread", [f"{WORKING}_0", "another"])
def test_a_rank_whose_thread_writes_a_checkpoint_says_so(
    tmp_path: Path, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that does not answer, though the main thread waits for other ranks."""
    begun, disk = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: (begun.set(), disk.wait(60)))
    writer = threading.Thread(target=write_file, args=(tmp_path,), name=thread)
    writer.start()
    try:
        assert begun.wait(60)
        assert standing(threading.get_ident()).writes is (thread != "another")
    finally:
        disk.set()
        writer.join()
    assert not standing(threading.get_ident()).writes


def test_a_rank_that_waits_for_another_as_it_saves_does_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: found.append(standing(threading.get_ident()).writes))
    write_file(tmp_path)
    monkeypatch.setattr("drivetrain.launch.diagnostics.process_state._call", lambda _: "all_gather")
    write_file(tmp_path)
    assert found == [True, False]
