from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain.data import picture_listing
from drivetrain.data.array_store import CONTENTS
from drivetrain.data.image_sources import class_folders
from drivetrain.data.images import image_suffixes
from drivetrain.data.picture_listing import Listing, listed
from drivetrain.errors import UserError

OLD = time.time_ns() - 10**11


@pytest.fixture(autouse=True)
def _few_files_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_listing, "LEAST", 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes, one with a folder below it, all of them changed long ago."""
    for name in ("cat/1.jpg", "cat/more/2.jpg", "dog/3.png", "dog/notes.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return settled(tmp_path / "data")


def settled(root: Path) -> Path:
    """A start trusts times that are older than two seconds."""
    for folder, _, _ in os.walk(root):
        os.utime(folder, ns=(OLD, OLD))
    return root


def names(root: Path, cache: Path) -> list[str]:
    return list(class_folders(root, "field", "train", cache).pictures.names)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Filled with a root for each time that its files are read."""
    seen: list[Path] = []
    read = picture_listing.read_folders

    def counted(root: Path, tops: Sequence[Path], suffixes: frozenset[str]) -> object:
        seen.append(root)
        return read(root, tops, suffixes)

    monkeypatch.setattr(picture_listing, "read_folders", counted)
    return seen


def test_a_second_start_reads_no_files_and_finds_the_same(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = class_folders(root, "field", "train", cache)
    seen = reads(monkeypatch)
    second = class_folders(root, "field", "train", cache)
    assert seen == []
    assert list(first.pictures.names) == list(second.pictures.names) == ["cat/1.jpg", "cat/more/2.jpg", "dog/3.png"]
    assert second.labels.tolist() == ["cat", "cat", "dog"]
    assert second.notes == first.notes
    assert "1 .txt" in second.notes[0]


def test_a_kept_list_is_that_of_a_whole_reading(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are no UTF-8, a link that is followed and one that is not."""
    os.close(os.open(os.fsencode(root / "dog") + b"/\xff.jpg", os.O_CREAT))
    other = tmp_path / "other"
    other.mkdir()
    (other / "0.jpg").write_bytes(b"")
    (root / "cat" / "linked").symlink_to(other)
    (root / "ant").symlink_to("dog")
    settled(root)
    kept = class_folders(root, "field", "train", tmp_path / "cache")
    monkeypatch.setattr(picture_listing, "LEAST", 100)
    held = class_folders(root, "field", "train", tmp_path / "none")
    assert list(kept.pictures.names) == list(held.pictures.names)
    assert kept.pictures.names[:3] == ["cat/1.jpg", "cat/more/2.jpg", "cat/linked/0.jpg"]
    assert kept.pictures.names[-1] == "dog/\udcff.jpg"
    assert (kept.labels.tolist(), kept.notes) == (held.labels.tolist(), held.notes)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "class added", "deep"])
def test_a_change_is_noticed(root: Path, tmp_path: Path, change: str) -> None:
    names(root, tmp_path / "cache")
    match change:
        case "added":
            (root / "dog" / "4.jpg").write_bytes(b"")
        case "removed":
            (root / "dog" / "3.png").unlink()
        case "renamed":
            (root / "dog" / "3.png").rename(root / "dog" / "5.png")
        case "class added":
            (root / "owl").mkdir()
            (root / "owl" / "6.jpg").write_bytes(b"")
        case "deep":
            (root / "cat" / "more" / "7.jpg").write_bytes(b"")
    expected = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.[jp]*g"))
    assert sorted(names(root, tmp_path / "cache")) == expected


def test_times_of_the_last_two_seconds_are_not_trusted(root: Path, tmp_path: Path) -> None:
    """A file that comes within the same tick of the file system's clock moves no time."""
    now = time.time_ns()
    os.utime(root / "dog", ns=(now, now))
    names(root, tmp_path / "cache")
    (root / "dog" / "4.jpg").write_bytes(b"")
    os.utime(root / "dog", ns=(now, now))
    assert not list((tmp_path / "cache").glob("folders-*.json"))  # nothing that the next start would believe
    assert "dog/4.jpg" in names(root, tmp_path / "cache")


def test_times_are_not_trusted_that_were_new_when_a_long_reading_began(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    os.utime(root / "dog", ns=(now, now))
    clock, read = [now], picture_listing.read_folders

    def slow(*given: Any) -> Any:
        clock[0] += 10**12
        return read(*given)

    monkeypatch.setattr(picture_listing, "read_folders", slow)
    monkeypatch.setattr(picture_listing.time, "time_ns", lambda: clock[0])
    names(root, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("folders-*.json"))


def test_a_folder_that_changes_while_it_is_listed_is_refused_and_nothing_is_kept(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = picture_listing.read_folders, []

    def changing(*given: object) -> object:
        calls.append(1)
        for each in read(*given):  # type: ignore[arg-type]
            if len(calls) == 2 and each.folder.endswith("dog"):  # when it is written, after it was looked at
                (root / "cat" / "late.jpg").write_bytes(b"")
                (root / "dog" / "late.jpg").write_bytes(b"")
            yield each

    monkeypatch.setattr(picture_listing, "read_folders", changing)
    with pytest.raises(UserError, match="changed while its files were listed"):
        names(root, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(f"*/{CONTENTS}"))


@pytest.mark.parametrize("damage", ["cut", "gone", "list", "list of others"])
def test_a_damaged_list_is_made_again(root: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    expected = names(root, cache)
    (store,), (known,) = cache.glob("listing-*/"), cache.glob("folders-*.json")
    match damage:
        case "cut":
            os.truncate(store / "names", 3)
        case "gone":
            (store / "order").unlink()
        case "list":
            known.write_text("{")
        case "list of others":
            known.write_text("[[1, 2, 3]]")
    again = class_folders(root, "field", "train", cache)
    assert list(again.pictures.names) == expected
    assert any("was damaged" in note for note in again.notes) == damage.startswith(("cut", "gone"))


def test_a_cache_that_cannot_be_written_costs_a_warning(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = class_folders(root, "field", "train", tmp_path / "file")
    assert list(found.pictures.names) == ["cat/1.jpg", "cat/more/2.jpg", "dog/3.png"]
    assert any("could not be cached" in note for note in found.notes)


def test_paths_are_made_when_asked_for_and_their_arrays_mapped(root: Path, tmp_path: Path) -> None:
    def tops() -> list[Path]:
        return [root / "cat", root / "dog"]

    found, _ = listed(root, tops, image_suffixes(), tmp_path / "cache", "field")
    assert isinstance(found, Listing)
    assert isinstance(found.top_of.base, memoryview)
    assert not found.top_of.flags.writeable
    assert [Path(file).is_file() for file in found.files] == [True] * 3
    assert found.files[1:] == [str(root / "cat/more/2.jpg"), str(root / "dog/3.png")]
