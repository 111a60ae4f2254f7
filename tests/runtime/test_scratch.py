"""Folders of launches: gone with their owner, or with the next launch after a kill; never while one lives."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.runtime import scratch
from drivetrain.runtime.scratch import delete_dead, join, make

OTHER = """
import sys, time
from pathlib import Path
from drivetrain.runtime import scratch
folder = Path(sys.argv[1])
used = scratch.join(folder) if sys.argv[2] == "join" else scratch.make(folder)
(used.path / "large").mkdir()
(used.path / "large" / "file").write_text("x")
print(used.path, flush=True)
time.sleep(600)
"""


def other(folder: Path, how: str = "make") -> tuple[subprocess.Popen[str], Path]:
    """Another process, and the folder that it uses."""
    process = subprocess.Popen([sys.executable, "-c", OTHER, str(folder), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def place_in(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def dead(parent: Path) -> Path:
    """Returns what a killed process left."""
    process, path = other(parent)
    kill(process)
    return path


def test_a_folder_ends_with_the_block(tmp_path: Path) -> None:
    with make(tmp_path) as path:
        assert path.parent == tmp_path
        (path / "file").write_text("")
        (path / "link").symlink_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_folder_and_what_lives_stays(tmp_path: Path) -> None:
    living, its = other(tmp_path)
    try:
        left = dead(tmp_path)
        with make(tmp_path) as mine, make(tmp_path) as second:
            assert not left.exists()
            assert (its / "large" / "file").exists()
            assert mine.exists(), "a process does not take its own for dead"
            assert second.exists()
        assert list(tmp_path.iterdir()) == [its]
    finally:
        kill(living)
    assert delete_dead(tmp_path) == [its]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_lives_as_long_as_one_of_its_users(tmp_path: Path) -> None:
    first = make(tmp_path)
    second, path = other(first.path, "join")
    try:
        assert path == first.path
        first.close()
        assert delete_dead(tmp_path) == []
        assert (path / "large" / "file").exists()
    finally:
        kill(second)
    assert delete_dead(tmp_path) == [path]


def test_the_last_user_deletes_the_folder(tmp_path: Path) -> None:
    first = make(tmp_path)
    second = join(first.path)
    third = join(tmp_path / "drivetrain-of-another-machine")  # on a disk of this one
    first.close()
    assert second.path.exists()
    second.close()
    assert not second.path.exists()
    third.close()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_folder_that_a_killed_user_kept_goes_too(tmp_path: Path) -> None:
    first = make(tmp_path)
    second, _ = other(first.path, "join")
    kill(second)
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_what_no_file_of_ours_proves_to_be_dead_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drivetrain-data").mkdir()
    (tmp_path / "drivetrain-data" / "mine").write_text("")
    (tmp_path / "drivetrain-file").write_text("")
    linked, foreign, unsigned, beginning, others = (dead(place_in(tmp_path, f"place-{n}")) for n in range(5))
    (tmp_path / "drivetrain-link").symlink_to(linked)
    [file] = foreign.glob(".owner-*")
    file.write_text(json.dumps({"host": "another", "boot": "another", "process": 1}))
    [file] = unsigned.glob(".owner-*")
    file.write_text("{")
    [file] = beginning.glob(".owner-*")
    file.rename(beginning / ".new-1")  # made, and not locked yet
    for path in (foreign, unsigned, beginning):
        path.rename(tmp_path / path.name)
    there = sorted(tmp_path.rglob("*"))
    assert delete_dead(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == there
    assert linked.exists()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert delete_dead(others.parent) == []
    assert others.exists()


@pytest.mark.parametrize("same", ["host", "boot"])
def test_what_was_left_before_a_restart_of_the_machine_or_by_another_container_goes(tmp_path: Path, same: str) -> None:
    left = dead(tmp_path)
    [file] = left.glob(".owner-*")
    signed = json.loads(file.read_text())
    assert signed["host"] == socket.gethostname()
    if not signed["boot"]:
        pytest.skip("this system gives a start of the machine no name")
    file.write_text(json.dumps({**signed, "host": "another", "boot": "another", same: signed[same]}))
    assert delete_dead(tmp_path) == [left]


def test_without_locks_nothing_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    left = dead(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        used = make(tmp_path)
        assert left.exists()
    assert delete_dead(tmp_path) == [left]
    assert used.path.exists(), "nor later, where there are some: its file was never locked"
    used.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_deleted_keeps_the_proof_for_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = dead(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert delete_dead(tmp_path) == []
        with make(tmp_path) as path:
            (path / "inner").mkdir()
    assert left.exists()
    assert path.exists()
    assert sorted(delete_dead(tmp_path)) == sorted([left, path])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_signed_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []
