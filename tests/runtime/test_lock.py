"""One run a folder: a second one is refused with who is there, and a run that was killed keeps no process out."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from drivetrain.checkpoint.directory import steps
from drivetrain.errors import UserError
from drivetrain.runtime.lock import LOCK, held
from drivetrain.runtime.run_folder import RunFolder
from tests.launch.test_start import command, finished_here, prepared, report, wait_for_step


@pytest.mark.long
def test_a_second_run_on_a_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """Really two runs, the first of two ranks: with --resume, with --overwrite and silently."""
    folder = prepared(tmp_path, "time.sleep(0.1)")
    settings = ("train", "run.yaml", "output=run", "checkpoints.every_steps=2")
    first = subprocess.Popen(
        command(*settings, "engine=ddp", "processes=2", "loop.steps=1000"),
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for_step(folder / "run" / "events.jsonl", 3)
        for option in ("--resume", "--overwrite", "--quiet"):
            words = " ".join(finished_here(folder, *settings, option, code=2).stderr.split())
            assert f"a run is working in run: process {first.pid} on {socket.gethostname()}, since 20" in words
        assert first.poll() is None
        ranks = psutil.Process(first.pid).children(recursive=True)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=20)
    assert gone
    assert not alive, "a killed parent leaves no rank"
    assert (folder / "run" / LOCK).exists(), "nobody could take it away"
    last = steps(folder / "run" / "checkpoints")[-1]
    finished_here(folder, *settings, "--resume", f"loop.steps={int(last.name.removeprefix('step-')) + 2}")
    assert report(folder / "run")["status"] == "completed"
    assert not (folder / "run" / LOCK).exists()


def test_a_lock_ends_with_the_block_and_leaves_no_folder_that_was_not_there(tmp_path: Path) -> None:
    with held(tmp_path / "run") as notice:
        assert notice is None
        assert (tmp_path / "run" / LOCK).exists()
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    with held(tmp_path / "mine"):
        pass
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_lock_file_that_its_holder_takes_away_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our opening and our lock the holder ends and removes the file; a third run would make a new one."""
    (tmp_path / LOCK).touch()
    real, taken = fcntl.lockf, []

    def lockf(descriptor: int, flags: int) -> None:
        if not taken:
            taken.append((tmp_path / LOCK).unlink())
        real(descriptor, flags)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with held(tmp_path):
        assert (tmp_path / LOCK).exists(), "the lock is on the file that others will open"


def test_a_lock_is_on_the_file_that_others_open_though_a_third_run_put_a_new_one_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file has the old one's name and not its inode: a lock on the old one keeps no process out."""
    (tmp_path / LOCK).touch()
    real, taken = fcntl.lockf, []

    def lockf(descriptor: int, flags: int) -> None:
        if not taken:
            (tmp_path / LOCK).unlink()
            taken.append((tmp_path / LOCK).touch())
        real(descriptor, flags)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with held(tmp_path):
        # by another process: this one would lose its lock by reading the file
        look = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run(
            [sys.executable, "-c", look, str(tmp_path / LOCK)], capture_output=True, text=True, check=False
        )
        assert "BlockingIOError" in other.stderr or "PermissionError" in other.stderr


def test_the_lock_of_another_run_stays_where_a_folder_took_the_place_of_ours(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / LOCK).write_text("another's")
    assert (tmp_path / "run" / LOCK).read_text() == "another's"


def test_a_full_disk_refuses_no_lock_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with held(tmp_path) as notice:
        assert notice is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_reported_and_keeps_no_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with held(tmp_path) as notice:
        assert notice is not None
        assert "has no locks: nothing keeps a second run out" in notice
        RunFolder(tmp_path).refuse_if_busy()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), held(tmp_path / "file" / "run"):
        pass
