"""Arrays on disk where the cache cannot be written, is damaged, or is wanted by several at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from drivetrain.data import block_work
from drivetrain.data.array_store import Store, Writer, stored
from drivetrain.data.block_work import stored_blocks
from drivetrain.errors import UserError
from drivetrain.runtime import scratch
from tests.small_tokenizers import made

PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np
from drivetrain.data.array_store import Writer, stored

def build(folder):
    with Writer(folder) as writer:
        writer.append("ids", np.arange(5))
        writer.finish({})

found, warning = stored(Path(sys.argv[1]) / "below", "tokens-1", build)
assert found.array("ids").tolist() == [0, 1, 2, 3, 4]
assert "could not be cached" in warning
print(found.folder, flush=True)
sys.stdin.read()
if sys.argv[2] == "at once":
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["usual", "at once"])
def test_what_lies_in_the_temporary_folder_instead_goes_with_its_process(how: str, tmp_path: Path) -> None:
    """At once: as ranks end, without exit handlers. Then the next launch removes it, and not before."""
    (tmp_path / "file").write_text("no folder")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), how]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        folder = Path(running.stdout.readline().strip())
        assert folder.parent == tmp_path
        assert scratch.delete_dead(tmp_path) == []
        assert (folder / "ids").exists()
        running.communicate("")
    assert running.returncode == 0
    assert scratch.delete_dead(tmp_path) == ([folder] if how == "at once" else [])
    assert not folder.exists()


# --- builders ---------------------------------------------------------------------------------------------------------

TEXTS = 4000


def write_numbers(folder: Path) -> None:
    with Writer(folder) as writer:
        writer.append("ids", np.arange(5))
        writer.append_ends("ends", [2, 3])
        writer.finish({})


def test_of_several_that_want_the_same_store_one_builds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built: list[str] = []
    begun = threading.Event()

    def build(folder: Path) -> None:
        built.append(threading.current_thread().name)
        begun.set()
        others[-1].join(1.5)  # they would be done by then, had they not to wait
        write_numbers(folder)

    found: list[Store] = []

    def get() -> None:
        begun.wait()
        found.append(stored(tmp_path, "tokens-1", build)[0])

    others = [threading.Thread(target=get) for _ in range(2)]
    for other in others:
        other.start()
    found.append(stored(tmp_path, "tokens-1", build)[0])
    for other in others:
        other.join()
    assert len(built) == 1
    assert [each.array("ids").tolist() for each in found] == [[0, 1, 2, 3, 4]] * 3
    assert "another process prepares the same data" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "contents cut", "contents empty"])
def test_a_damaged_store_is_built_again_with_a_warning(damage: str, tmp_path: Path) -> None:
    place = stored(tmp_path, "tokens-1", write_numbers)[0].folder
    match damage:
        case "cut":
            os.truncate(place / "ids", 8)
        case "changed":
            (place / "ids").write_bytes(bytes(40))
        case "gone":
            (place / "ends").unlink()
        case "contents cut":
            os.truncate(place / "contents.json", 20)
        case "contents empty":
            (place / "contents.json").write_text("{}")
    found, warning = stored(tmp_path, "tokens-1", write_numbers)
    assert warning is not None
    assert "was damaged" in warning
    assert found.array("ids").tolist() == [0, 1, 2, 3, 4]
    assert stored(tmp_path, "tokens-1", write_numbers)[1] is None


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file may have more bytes; helpers inherit that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def tokens_of(start: int, stop: int) -> dict[str, np.ndarray]:
    return {"ids": np.arange(start, stop, dtype=np.int32), "lengths": np.ones(stop - start, np.int32)}


def get_blocks(folder: Path) -> Store:
    tokenizer = made("bert")  # of Transformers, so that it travels
    sizes: Callable[[], np.ndarray] = lambda: np.full(TEXTS, 10)  # noqa: E731
    return stored_blocks((folder, "tokens-1"), tokenizer, tokens_of, sizes, lambda _: 0)[0]


@pytest.mark.parametrize(
    ("most", "processes"),
    [(2_000, 1), (2_000, 2), (12_000, 1)],
    ids=["while blocks are made", "while several processes make them", "while they are joined"],
)
def test_a_disk_that_fills_up_is_an_error_that_names_the_folder_and_the_next_start_goes_on(
    most: int, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_work, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(block_work, "MEASURED", 0.0)  # processes at once
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processes)))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # Python leaves a file of bytecode that the limit cut short
    with full_disk(most), pytest.raises(UserError) as error:
        get_blocks(tmp_path)
    (words,) = error.value.problems
    assert f"{tmp_path / 'tokens-1'} cannot be written: File too large" in words.why
    assert "make room" in words.fix
    assert not (tmp_path / "tokens-1" / "contents.json").exists()
    assert not list(tmp_path.rglob("*.partial"))
    found = get_blocks(tmp_path)
    assert found.array("ids").tolist() == list(range(TEXTS))
    assert found.array("offsets").tolist() == list(range(TEXTS + 1))
    assert sorted(file.name for file in found.folder.iterdir()) == ["contents.json", "ids", "offsets"]
