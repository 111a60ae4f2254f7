"""A file is replaced by another as a whole, or kept."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from drivetrain.runtime.atomic_file import followed, remove_abandoned, write_whole

Patch = pytest.MonkeyPatch


def test_the_text_is_written_as_it_is(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "é\r\n\n")
    assert (tmp_path / "file").read_bytes() == "é\r\n\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failing", ["write_text", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_was_there_stays_where_the_new_cannot_be_written(
    tmp_path: Path, monkeypatch: Patch, failing: str, error: BaseException
) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    (tmp_path / "other").write_text("")

    def full(path: Path, *_: Any, **__: Any) -> None:
        path.touch()
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Path, failing, full)
        with pytest.raises(type(error)):
            write_whole(file, "after")
    assert file.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


def test_a_link_stays_and_what_it_points_at_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere" / "file")
    write_whole(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_text() == "text"


def test_a_path_leads_where_its_links_lead_and_one_that_leads_nowhere_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    assert followed(tmp_path / "link") == followed(str(tmp_path / "file")) == (tmp_path / "file").resolve()
    for nowhere in (tmp_path / "round", Path("a\0b")):
        assert followed(nowhere).name == nowhere.name


def test_two_threads_that_write_one_file_leave_one_whole_text(tmp_path: Path) -> None:
    both = threading.Barrier(2)
    texts = ["a" * 1000, "b" * 2000]

    def write(text: str) -> None:
        for _ in range(50):
            both.wait()
            write_whole(tmp_path / "file", text)
            assert (tmp_path / "file").read_text() in texts

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, texts))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_goes_and_what_another_process_writes_stays(tmp_path: Path) -> None:
    writer = (
        "import sys, time; from pathlib import Path; from drivetrain.runtime.atomic_file import in_use, replacing\n"
        "with replacing(Path(sys.argv[1])) as aside:\n"
        "    aside.write_text('half')\n"
        "    with in_use(aside):\n"
        "        print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", writer, str(tmp_path / "reference-1.npy")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (tmp_path / ".other-1.npy.partial-1-1").touch()
        remove_abandoned(tmp_path, "reference-*.npy")
        assert len([*tmp_path.iterdir()]) == 2, "it is being written"
        process.kill()
    remove_abandoned(tmp_path, "reference-*.npy")
    assert [path.name for path in tmp_path.iterdir()] == [".other-1.npy.partial-1-1"]
