from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.data.shard_paths import is_pattern, shard_files
from drivetrain.errors import UserError


def files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"")


def found(path: object) -> list[str]:
    return [file.name for file in shard_files(str(path), "field", (".tar",))]


def test_braces_give_shards_in_their_order(tmp_path: Path) -> None:
    files(tmp_path, "a-008.tar", "a-009.tar", "a-010.tar", "b-x.tar", "b-y.tar")
    assert found(tmp_path / "a-{008..010}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar"]
    assert found(tmp_path / "a-{010..009}.tar") == ["a-010.tar", "a-009.tar"]
    assert found(tmp_path / "b-{y,x}.tar") == ["b-y.tar", "b-x.tar"]


def test_folders_and_patterns_are_sorted(tmp_path: Path) -> None:
    files(tmp_path, "b.tar", "a.tar", "c.txt")
    assert found(tmp_path) == found(tmp_path / "*.tar") == ["a.tar", "b.tar"]
    assert found(tmp_path / "b.tar") == ["b.tar"]


def test_a_file_whose_name_has_braces_is_that_file(tmp_path: Path) -> None:
    files(tmp_path, "a{0..1}.tar")
    assert not is_pattern(str(tmp_path / "a{0..1}.tar"))
    assert found(tmp_path / "a{0..1}.tar") == ["a{0..1}.tar"]


def test_shards_that_are_not_there_are_named(tmp_path: Path) -> None:
    files(tmp_path, "a-0.tar", "a-2.tar")
    with pytest.raises(UserError, match=r"2 of the 4 files of .* are not there: .*a-1\.tar, .*a-3\.tar"):
        found(tmp_path / "a-{0..3}.tar")
    with pytest.raises(UserError, match="no file fits"):
        found(tmp_path / "*.tgz")
    with pytest.raises(UserError, match="does not exist"):
        found(tmp_path / "c.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no file that ends in \.tar"):
        found(tmp_path / "empty")


def test_wildcards_match_no_hidden_files(tmp_path: Path) -> None:
    (tmp_path / ".hidden").mkdir()
    files(tmp_path, "a.tar", ".b.tar", ".hidden/c.tar")
    assert found(tmp_path / "*.tar") == found(tmp_path / "**" / "*.tar") == ["a.tar"]
    with pytest.raises(UserError, match="no file fits"):
        found(tmp_path / "*" / "c.tar")


def test_braces_that_stand_for_too_many_files_are_refused_before_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stands for 10,000,000,000 files"):
        found(tmp_path / "a-{0000000000..9999999999}.tar")
