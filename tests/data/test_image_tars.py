from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drivetrain.config.workload import ImageData
from drivetrain.data.image_sources import pictures_to_predict, read_pictures
from drivetrain.data.images import LabelledPictures
from drivetrain.errors import RunError, UserError


def picture(grey: int, kind: str = "PNG") -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (4, 3), (grey, grey, grey)).save(held, kind)
    return held.getvalue()


def archive(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as made:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path


def read(path: object, cache: Path, **more: Any) -> LabelledPictures:
    config = ImageData(source="webdataset", train=str(path), cache=cache, **more)
    return read_pictures(config, str(path), "workload.data.train", "train")


def refused(path: object, cache: Path, **more: Any) -> str:
    with pytest.raises(UserError) as error:
        read(path, cache, **more)
    return " | ".join(f"{each.why}: {each.fix}" for each in error.value.problems)


def greys(found: LabelledPictures) -> list[int]:
    return [int(found.pictures.pixels(index, None)[0, 0, 0]) for index in range(len(found.numbers))]


def shards(folder: Path, count: int = 2) -> Path:
    """Shard s has samples 10 s to 10 s + 2, whose grey is their number, and whose label lies in a .cls."""
    for shard in range(count):
        members = {}
        for number in range(10 * shard, 10 * shard + 3):
            members[f"{number:04d}.png"] = picture(number)
            members[f"{number:04d}.cls"] = str(number % 2).encode()
        archive(folder / f"s-{shard:03d}.tar", members)
    return folder


def test_samples_come_shard_after_shard_in_the_archives_order(tmp_path: Path) -> None:
    found = read(shards(tmp_path / "data") / "s-{000..001}.tar", tmp_path / "cache")
    assert greys(found) == [0, 1, 2, 10, 11, 12]
    assert found.labels.tolist() == ["0", "1", "0", "0", "1", "0"]
    assert found.pictures.names[4] == "s-001.tar/0011.png"


def test_a_second_start_reads_no_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shards(tmp_path / "data")
    first = read(folder, tmp_path / "cache")
    monkeypatch.setattr(tarfile, "open", None)
    second = read(folder, tmp_path / "cache")
    assert greys(second) == greys(first)
    assert list(second.pictures.names) == list(first.pictures.names)


def test_pictures_are_those_that_tarfile_extracts_whatever_the_headers_form(tmp_path: Path) -> None:
    long = "deep/" * 30 + "name" * 20
    names = ["a/1.jpg", f"{long}.jpg", "Ü/ü.png"]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"{form}.tar"
        with tarfile.open(path, "w", format=form) as made:
            for number, name in enumerate(names):
                for each, content in ((name, picture(40 * number)), (name[:-3] + "cls", b"x")):
                    member = tarfile.TarInfo(each)
                    member.size = len(content)
                    made.addfile(member, io.BytesIO(content))
        found = read(path, tmp_path / "cache")
        with tarfile.open(path) as opened:
            for index, name in enumerate(names):
                held = opened.extractfile(name)
                assert held is not None
                np.testing.assert_array_equal(found.pictures.pixels(index, None), np.asarray(Image.open(held)))


def test_labels_of_json_and_members_of_one_sample_that_stand_apart(tmp_path: Path) -> None:
    members = {
        "a.png": picture(1),
        "b.png": picture(2),
        "a.json": json.dumps({"species": "ant", "n": 3}).encode(),
        "b.json": json.dumps({"species": "bee"}).encode(),
        "b.seg.png": picture(9),
        "README": b"x",
    }
    path = archive(tmp_path / "a.tar", members)
    found = read(path, tmp_path / "cache", label_column="species")
    assert (found.labels.tolist(), greys(found)) == (["ant", "bee"], [1, 2])


def test_samples_that_cannot_be_used_are_counted_by_the_rule_of_bad_rows(tmp_path: Path) -> None:
    members = {f"{number}.png": picture(number) for number in range(10)}
    members |= {f"{number}.cls": b"x" for number in range(8)}
    members |= {"9.json": b"{", "only.cls": b"y"}
    path = archive(tmp_path / "a.tar", members)
    why = refused(path, tmp_path / "cache")
    assert "2 of the 10 rows" in why
    assert "1 because it has no label: neither a .cls nor a .json (first a.tar/8)" in why
    assert "1 because its .json cannot be read (first a.tar/9)" in why
    assert "bad_rows=0.2" in why
    found = read(path, tmp_path / "cache", bad_rows=0.2)
    assert greys(found) == list(range(8))
    assert [
        "1 sample of the archives left out for want of a picture" in found.notes[0],
        "2 of 10 samples" in found.notes[1],
    ] == [
        True,
        True,
    ]


def test_two_pictures_of_one_sample_are_no_sample(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", {"a.png": picture(1), "a.jpg": picture(1, "JPEG"), "a.cls": b"x"})
    assert "no sample of" in refused(path, tmp_path / "cache")


def test_a_cut_archive_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = (shards(tmp_path / "data", 1) / "s-000.tar").read_bytes()
    path = tmp_path / "cut.tar"
    for size in (len(whole) // 8, 700, 1024, 512 * 6, 512 * 5 + 9):  # in a header, in a file, between two files
        path.write_bytes(whole[: min(size, 512 * 12)])
        assert "cut.tar " in refused(path, tmp_path / "cache"), size


def test_what_is_no_plain_archive_is_refused_with_the_reason_all_at_once(tmp_path: Path) -> None:
    folder = shards(tmp_path / "data")
    plain = (folder / "s-000.tar").read_bytes()
    (folder / "s-002.tar.gz").write_bytes(gzip.compress(plain))
    (folder / "s-003.tar").write_bytes(gzip.compress(plain))
    (folder / "s-004.tar").write_bytes(b"no archive at all" * 100)
    (folder / "s-005.tar").write_bytes(plain + plain)
    why = refused(folder, tmp_path / "cache")
    assert why.count("is compressed (gzip)") == 2
    assert "s-004.tar cannot be read as a tar archive" in why
    assert "s-005.tar goes on behind its end" in why
    assert not list((tmp_path / "cache").glob("*/contents.json"))


def test_an_archive_that_changes_or_vanishes_during_a_run_is_named(tmp_path: Path) -> None:
    folder = shards(tmp_path / "data")
    found = read(folder, tmp_path / "cache")
    os.utime(folder / "s-000.tar", ns=(1, 1))
    with pytest.raises(RunError, match=r"s-000\.tar changed since its pictures were listed"):
        found.pictures.pixels(0, None)
    (folder / "s-001.tar").unlink()
    with pytest.raises(RunError, match=r"s-001\.tar/0010\.png cannot be read as an image: No such file"):
        found.pictures.pixels(3, None)


def test_an_archive_that_was_replaced_is_listed_again(tmp_path: Path) -> None:
    folder = shards(tmp_path / "data", 1)
    read(folder, tmp_path / "cache")
    archive(folder / "s-000.tar", {"z.png": picture(77), "z.cls": b"1", "y.png": picture(78), "y.cls": b"0"})
    assert greys(read(folder, tmp_path / "cache")) == [77, 78]


def test_predictions_need_no_labels(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", {"a.png": picture(5), "b.png": picture(6)})
    found = pictures_to_predict(ImageData(source="digits", cache=tmp_path / "cache"), str(path), "--data")
    assert list(found.names) == ["a.tar/a.png", "a.tar/b.png"]
    assert int(found.pixels(1, None)[0, 0, 0]) == 6
