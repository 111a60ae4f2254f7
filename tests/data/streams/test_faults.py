"""Shards that vanish, are damaged, change or hold what is no row: named with their place, and nothing trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivetrain.data.streams.rows_set import StreamedRows
from drivetrain.data.streams.shards import find_shards
from drivetrain.errors import UserError
from tests.data.streams.shard_files import ENDINGS, numbers_of, opened, write_shard, write_shards


def all_of(stream: StreamedRows) -> list[int]:
    return [stream.load(draw) for draw in range(40)]


def drained(folder: Path, buffer: int = 16) -> list[int]:
    return all_of(numbers_of(opened(folder), buffer))


def test_a_shard_that_vanishes_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [10] * 4, [".jsonl.gz"])
    stream = numbers_of(opened(tmp_path / "shards"), 8)
    stream.load(0)
    for file in (tmp_path / "shards").iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"000\d\.jsonl\.gz vanished\n    put it back, and go on with --resume"):
        all_of(stream)


@pytest.mark.parametrize("ending", [each for each in ENDINGS if each not in (".jsonl", ".arrow", ".parquet")])
def test_a_compressed_file_that_is_cut_short_is_named(tmp_path: Path, ending: str) -> None:
    write_shards(tmp_path / "shards", [4000], [ending])
    file = tmp_path / "shards" / f"0000{ending}"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=rf"0000{ending}: compressed file is damaged or cut short"):
        numbers_of(opened(tmp_path / "shards"), 5000).load(0)
    with pytest.raises(UserError, match="damaged or cut short"):
        len(numbers_of(opened(tmp_path / "shards"), 16))


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.bz2", ".jsonl.xz"])
def test_a_byte_that_is_wrong_in_a_compressed_file_is_found_before_its_block_is_used(
    tmp_path: Path, ending: str
) -> None:
    write_shards(tmp_path / "shards", [4000], [ending])
    file = tmp_path / "shards" / f"0000{ending}"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"0000.*damaged or cut short"):
        numbers_of(opened(tmp_path / "shards"), 5000).load(0)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [40], [".parquet"])
    file = tmp_path / "shards" / "0000.parquet"
    content = bytearray(file.read_bytes())
    content[4:60] = bytes(56)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"0000\.parquet cannot be read"):
        drained(tmp_path / "shards")


def test_a_broken_row_is_named_by_file_and_line_and_no_other_is_lost(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [10] * 4, [".jsonl"])
    file = tmp_path / "shards" / "0002.jsonl"
    lines = file.read_text().splitlines()
    lines[6] = '{"number": '
    file.write_text("\n".join(lines) + "\n")
    stream = numbers_of(opened(tmp_path / "shards"), 8)
    taken, refused = [], []
    for draw in range(40):
        try:
            taken.append(stream.load(draw))
        except ValueError as error:
            refused.append(str(error))
    assert sorted(taken) == [number for number in range(40) if number != 26]
    (words,) = refused
    assert words.startswith("0002.jsonl line 7: it is broken JSON")


def test_a_file_that_changed_since_its_rows_were_counted_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [10] * 4, [".jsonl"])
    stream = numbers_of(opened(tmp_path / "shards"), 8)
    assert len(stream) == 40
    file = next((tmp_path / "shards").glob("0003*"))
    file.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(3)))
    with pytest.raises(UserError, match=r"0003\.jsonl has 3 rows, and 10 when they were counted"):
        all_of(stream)


def test_files_of_another_encoding_are_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.jsonl").write_bytes(b'{"number": 1}\n{"number": "\xe9"}\n')
    with pytest.raises(UserError, match="is not UTF-8: line 2"):
        drained(tmp_path / "shards")


def test_what_no_stream_reads_is_refused_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "a.jsonl", [1])
    (tmp_path / "shards" / "b.jsonl").touch()
    (tmp_path / "shards" / "c.parquet").write_bytes(b"none")
    with pytest.raises(UserError) as caught:
        find_shards(str(tmp_path / "shards"), "workload.data.train")
    words = str(caught.value)
    assert "b.jsonl is empty" in words
    assert "c.parquet cannot be read" in words
    for path, why in (
        ("none/*.jsonl", r"none/\*\.jsonl matches no file"),
        (str(tmp_path / "x.jsonl"), "does not exist"),
    ):
        with pytest.raises(UserError, match=why):
            find_shards(path, "workload.data.train")
    (tmp_path / "d.parquet.gz").write_bytes(b"x")
    with pytest.raises(UserError, match="is compressed as a whole"):
        find_shards(str(tmp_path / "d.parquet.gz"), "workload.data.train")


def test_a_pattern_takes_the_files_it_matches_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [2, 2, 2, 2], [".jsonl", ".jsonl.gz"])
    found = find_shards(f"{tmp_path}/shards/*.gz", "workload.data.train")
    assert [shard.name for shard in found] == ["0001.jsonl.gz", "0003.jsonl.gz"]
