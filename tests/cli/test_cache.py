"""`drivetrain cache`: what it lists and removes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from drivetrain.data.array_store import Store, Writer, stored
from drivetrain.data.cache_entries import DAY, entries, pruned

Command = Callable[..., tuple[int, str, str]]
OLD, MIDDLE, NEW = (f"{kind}-{'0' * 39}{number}" for number, kind in enumerate(("rows", "tokens", "texts")))


def build(folder: Path) -> None:
    with Writer(folder) as writer:
        writer.append("ids", np.zeros(250_000, np.int32))
        writer.finish({})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three stores of a megabyte each, used 40, 20 and 0 days ago, beside files that are not the project's."""
    root = tmp_path / "cache"
    for name, days in ((OLD, 40), (MIDDLE, 20), (NEW, 0)):
        stored(root, name, build)
        then = time.time() - days * DAY
        os.utime(root / name / "contents.json", (then, then))
    (root / "thesis.txt").write_text("all of it")
    (root / "rows-backup").mkdir()
    return root


def names(root: Path) -> list[str]:
    return [entry.path.name for entry in entries(root)]


def test_they_are_listed_with_the_longest_unused_first(root: Path, drivetrain: Command) -> None:
    assert names(root) == [OLD, MIDDLE, NEW]
    code, out, _ = drivetrain("cache", "--folder", str(root))
    assert code == 0
    assert "tokens of a table" in out
    assert "3.0 MB in" in out
    found = json.loads(drivetrain("cache", "--folder", str(root), "--json")[1])
    assert [each["kind"] for each in found["entries"]] == ["rows of a table", "tokens of a table", "tokens of texts"]


def test_a_start_that_takes_the_arrays_counts_as_use(root: Path) -> None:
    stored(root, OLD, build)
    assert names(root) == [MIDDLE, NEW, OLD]


def test_what_was_not_used_for_so_long_goes(root: Path, drivetrain: Command) -> None:
    code, out, _ = drivetrain("cache", "--folder", str(root), "--unused-days", "30")
    assert code == 0
    assert f"removed rows of a table, 1.0 MB: {OLD}" in out
    assert names(root) == [MIDDLE, NEW]


def test_the_longest_unused_go_until_the_rest_fits(root: Path) -> None:
    removed, in_use = pruned(root, None, 1_100_000)
    assert [entry.path.name for entry in removed] == [OLD, MIDDLE]
    assert in_use == []
    assert (root / "thesis.txt").read_text() == "all of it"
    assert (root / "rows-backup").is_dir()


def test_an_empty_cache_is_no_error(tmp_path: Path, drivetrain: Command) -> None:
    code, out, _ = drivetrain("cache", "--folder", str(tmp_path / "none"), "--most-gb", "0")
    assert (code, "holds no tokenised data" in out) == (0, True)


HOLDING = """
import sys
from pathlib import Path
from drivetrain.data.array_store import stored
store, _ = stored(Path(sys.argv[1]), sys.argv[2], None)
ids = store.array("ids")
print("mapped", flush=True)
sys.stdin.readline()
assert ids.sum() == 0
"""


@pytest.fixture
def holder(root: Path) -> Iterator[None]:
    """Another process that has the oldest arrays mapped, as a run in progress."""
    command = [sys.executable, "-c", HOLDING, str(root), OLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "mapped\n"
        yield
        process.stdin.write("\n")
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
@pytest.mark.usefixtures("holder")
def test_what_a_process_has_mapped_stays(root: Path, drivetrain: Command) -> None:
    code, out, _ = drivetrain("cache", "--folder", str(root), "--most-gb", "0")
    assert code == 0
    assert f"in use, and left: rows of a table, 1.0 MB: {OLD}" in out
    assert names(root) == [OLD]


def test_what_is_being_built_stays(root: Path) -> None:
    (root / OLD / "contents.json").unlink()
    with FileLock(root / f"{OLD}.lock"):
        removed, in_use = pruned(root, None, 0)
    assert OLD not in [entry.path.name for entry in removed]
    assert [(entry.path.name, entry.is_whole) for entry in in_use] == [(OLD, False)]


def test_arrays_that_are_gone_are_made_again(root: Path) -> None:
    pruned(root, None, 0)
    found, warning = stored(root, OLD, build)
    assert isinstance(found, Store)
    assert (len(found.array("ids")), warning) == (250_000, None)
