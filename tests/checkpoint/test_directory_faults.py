"""Full disks, closed folders and kills: what was saved before is still there, and the error says what to do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint.directory import load, newest_good
from drivetrain.checkpoint.saving import save
from drivetrain.errors import RunError

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and changing the user take root")


def parts(version: int, numbers: int = 8) -> dict[str, Any]:
    return {"model": {"w": torch.full((numbers,), float(version))}, "training": {"version": version}}


def assert_only_the_first_is_there(root: Path, error: pytest.ExceptionInfo[RunError], *words: str) -> None:
    message = str(error.value)
    for text in (
        "step 2 could not be saved",
        "MiB needed",
        "MiB free",
        f"{root / 'step-00000001'}",
        "--resume",
        *words,
    ):
        assert text in message
    assert [path.name for path in root.iterdir()] == ["step-00000001"], "nothing half-written is left"
    found, _ = newest_good(root)
    assert found is not None
    assert load(found)["training"]["version"] == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@as_root
def test_a_checkpoint_larger_than_the_free_space_is_refused_before_writing(small_disk: Path) -> None:
    save(small_disk, 1, parts(1), {})
    with pytest.raises(RunError) as error:
        save(small_disk, 2, parts(2, numbers=2**19), {})
    assert_only_the_first_is_there(small_disk, error, "no space left (2.0 MiB needed, 1.0 MiB free)")


@as_root
def test_a_disk_that_fills_up_while_saving(small_disk: Path) -> None:
    save(small_disk, 1, parts(1), {})
    history = {"history": list(range(2**19))}  # JSON of 4 MiB, which the check beforehand does not foresee
    with pytest.raises(RunError) as error:
        save(small_disk, 2, parts(2) | {"log": history}, {})
    assert_only_the_first_is_there(small_disk, error, "No space left on device")


@as_root
def test_a_disk_that_is_filled_while_the_weights_are_written(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(small_disk, 1, parts(1), {})
    unlimited = type("Usage", (), {"free": 2**40})
    monkeypatch.setattr("drivetrain.runtime.storage.shutil.disk_usage", lambda _: unlimited)
    with pytest.raises(RunError) as error:
        save(small_disk, 2, parts(2, numbers=2**19), {})
    assert_only_the_first_is_there(small_disk, error, "No space left on device")


def test_a_file_size_limit(tmp_path: Path) -> None:
    save(tmp_path, 1, parts(1), {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(RunError) as error:
            save(tmp_path, 2, parts(2, numbers=2**16), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_only_the_first_is_there(tmp_path, error, "File too large")


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunError, match=r"step 2 could not be saved.*exists.*No earlier checkpoint"):
        save(tmp_path / "checkpoints", 2, parts(2), {})


@as_root
def test_a_read_only_file_system(small_disk: Path) -> None:
    save(small_disk, 1, parts(1), {})
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunError) as error:
        save(small_disk, 2, parts(2), {})
    assert_only_the_first_is_there(small_disk, error, "Read-only file system")


@pytest.fixture
def nobody(tmp_path: Path) -> Iterator[None]:
    """A user to whom permissions apply; the folder of the test stays root's own."""
    assert tmp_path.stat().st_uid == 0
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


@as_root
@pytest.mark.usefixtures("nobody")
def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"step 2 could not be saved.*Permission denied"):
        save(tmp_path / "checkpoints", 2, parts(2), {})


# A server that has imported everything once and forks a saver for each kill, so that a kill costs milliseconds.
# Each saver is killed at one event of the interpreter's audit trail (opening, renaming, removing, ...), the next one at
# the event after, until one gets through; then savers are killed after random times, which hits writing and syncing.
# After each kill the newest good checkpoint must hold exactly the old or exactly the new state.
KILLS = """
import itertools, os, random, signal, sys, time
from pathlib import Path
import torch
from drivetrain.checkpoint.directory import clean_partials, load, newest_good
from drivetrain.checkpoint.saving import save
from drivetrain.checkpoint.retention import prune

torch.set_num_threads(1)
root, same_step = Path(sys.argv[1]), sys.argv[2] == "same step"
WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}

def state(version):
    return {"model": {"w": torch.full((20000,), float(version))}, "training": {"version": version}}

def version_in(path):
    parts = load(path)
    version = parts["training"]["version"]
    assert torch.equal(parts["model"]["w"], state(version)["model"]["w"]), "parts of two states are mixed"
    return version

def save_version(version):
    save(root, 1 if same_step else version, state(version), {"metric": version})
    prune(root, keep_last=1, keep_best=0, higher_is_better=True)

def fork(version, before_saving):
    pid = os.fork()
    if pid == 0:
        before_saving()
        save_version(version)
        os._exit(0)
    return pid

def die_at(event_number):
    left = itertools.count(event_number, -1)
    def hook(event, _):
        if event in WATCHED and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def check(pid, before, version):
    status = os.waitpid(pid, 0)[1]
    newest, skipped = newest_good(root)
    assert newest is not None, f"nothing good is left: {sorted(p.name for p in root.iterdir())}, {skipped}"
    assert not skipped, skipped
    found = version_in(newest)
    assert found in (before, version), (found, before, version)
    clean_partials(root)
    assert version_in(newest_good(root)[0]) == found, "cleaning up changed what is newest"
    prune(root, keep_last=1, keep_best=0, higher_is_better=True)  # each saver starts from one, and so ends
    assert [p.name for p in root.iterdir()] == [newest_good(root)[0].name], "leftovers stay"
    assert version_in(newest_good(root)[0]) == found
    return found, status

save_version(1)
current, kills, survived_new = 1, 0, 0
for number in itertools.count():
    version = current + 1
    found, status = check(fork(version, lambda: die_at(number)), current, version)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0 and found == version
        break
    kills, survived_new, current = kills + 1, survived_new + (found == version), found
assert 0 < survived_new < kills, "kills before and after the new one is in place"

start = time.perf_counter()
save_version(current + 2)
current, duration = current + 2, time.perf_counter() - start
dice = random.Random(0)
for _ in range(25):
    version = current + 1
    pid = fork(version, lambda: None)
    time.sleep(dice.uniform(0, 1.2 * duration))
    os.kill(pid, signal.SIGKILL)
    current, _ = check(pid, current, version)
print(f"{kills} kills by event")
"""


@pytest.mark.long
@pytest.mark.parametrize("steps", ["same step", "new steps"])
def test_killed_at_any_moment_the_newest_good_checkpoint_is_one_that_was_saved(tmp_path: Path, steps: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), steps], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 20
