"""Files read in blocks have the rows, places and faults of a whole reading."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drivetrain.config.data_paths import missing
from drivetrain.config.language_data import Documents, Separated
from drivetrain.data import json_array
from drivetrain.data.json_rows import BrokenRows
from drivetrain.data.row_blocks import RowFile
from drivetrain.data.rows import open_rows
from drivetrain.errors import UserError

ROWS = [{"text": f'row {number}\u2028 of é, "quoted"\nand more', "n": number} for number in range(2500)]


def pack_zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as opened:
        opened.write(content)
    return sink.getvalue().to_pybytes()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": pack_zstd,
}


def in_blocks(file: Path, documents: Documents = "file") -> tuple[list[Any], list[str], list[str]]:
    opened = RowFile(file, file.name, "f", documents)
    blocks = list(opened.blocks())
    assert all(len(block.rows) <= 2048 for block in blocks)
    places = [opened.where(number) for block in blocks for number in block.numbers]
    return [row for block in blocks for row in block.rows], places, [f for block in blocks for f in block.faults]


def whole(file: Path, documents: Documents = "file") -> tuple[list[Any], list[str]]:
    rows = open_rows(str(file), "f", documents=documents)
    return rows.read(0, len(rows)), [rows.where(index) for index in range(len(rows))]


def json_lines() -> str:
    return "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def csv_text(separator: str) -> str:
    quoted = ['"{}"'.format(str(row["text"]).replace('"', '""')) + f"{separator}{row['n']}" for row in ROWS]
    return f"text{separator}n\r\n\r\n" + "\r\n".join(quoted)


CONTENTS = {
    "a.jsonl": json_lines(),
    "b.ndjson": "\ufeff" + json_lines(),
    "list.json": json.dumps(ROWS, indent=1),
    "compact.json": json.dumps(ROWS, ensure_ascii=False),
    "data.json": json.dumps({"version": [1][0], "about": {"list": [1, 2]}, "data": ROWS, "end": None}),
    "lines.json": json_lines(),
    "a.csv": csv_text(","),
    "a.tsv": csv_text("\t"),
    "plain.tsv": "text\tn\n" + "\n".join(f'said "{number}\t{number}' for number in range(1500)),
    "a.txt": "a text\n\nof two parts\n",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_blocks_have_the_rows_and_places_of_a_whole_reading(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "WINDOW", 100)  # so that values are cut everywhere
    file = tmp_path / name
    file.write_bytes(CONTENTS[name].encode())
    rows, places, faults = in_blocks(file)
    assert (rows, places) == whole(file)
    assert not faults
    assert len(rows) > 1000 or name == "a.txt"
    for ending, pack in PACKERS.items():
        packed = tmp_path / f"{name}{ending}"
        packed.write_bytes(pack(file.read_bytes()))
        again = in_blocks(packed)
        assert again[0] == rows
        assert again[1] == [place.replace(name, packed.name) for place in places]
        assert (again[0], again[1]) == whole(packed)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_of_arrow_have_the_rows_of_a_whole_reading(tmp_path: Path, kind: str) -> None:
    table = pa.Table.from_pylist([{"m": [{"a": 1, "b": None}, {"a": None, "b": "x"}], "n": n} for n in range(2300)])
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, file, row_group_size=2200)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1300)
    rows, places, _ = in_blocks(file)
    assert (rows, places) == whole(file)


BROKEN = {
    "cut.json": '[{"a": 1}, {"a": "half',
    "comma.json": '[{"a": 1}\n {"a": 2}]',
    "behind.json": '[{"a": 1}]\n[]',
    "word.json": '[{"a": 1},\n {"a": nil}]',
    "key.json": '{"data": [{"a": 1}], 3: 4}',
    "open.json": '[{"a": 1},',
    "nothing.json": "   ",
    "number.json": "12",
    "lists.json": '{"data": [{"a": 1}], "more": []}',
    "rows.json": '[{"a": 1}, 3, {"a": "\\ud800"}, {"a": 4}]',
    "a.jsonl": '{"a": 1}\n[]\n{"a"\n{"a": 2}',
    "wide.csv": "a,b\n1,2\n1,2,3\n",
    "quote.csv": 'a,b\n1,2\n"1,2\n',
    "twins.csv": "a,a\n1,2\n",
    "header.csv": "a,b\n",
    "latin.csv": "a,b\n1,2\n\xe9,2\n",
    "latin.json": '[{"a": "\xe9"}]',
    "latin.txt": "a\n\xe9",
}


@pytest.mark.parametrize("name", BROKEN)
def test_blocks_refuse_what_a_whole_reading_refuses_with_the_same_words(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "WINDOW", 3)
    file = tmp_path / name
    file.write_bytes(BROKEN[name].encode("latin-1" if "latin" in name else "utf-8"))
    with pytest.raises(UserError) as wanted:
        open_rows(str(file), "f")
    if not isinstance(wanted.value, BrokenRows):
        with pytest.raises(UserError) as caught:
            in_blocks(file)
        assert [each.why for each in caught.value.problems] == [each.why for each in wanted.value.problems]
        return
    rows, places, faults = in_blocks(file)
    assert [RowFile(file, name, "f").broken(faults)] == list(wanted.value.problems)
    left = wanted.value.rows
    assert (rows, places) == (left.read(0, len(left)), [left.where(index) for index in range(len(left))])


@pytest.mark.parametrize("ending", PACKERS)
def test_a_damaged_or_cut_compressed_file_is_refused_by_name(tmp_path: Path, ending: str) -> None:
    packed = PACKERS[ending](json_lines().encode())
    for number, content in enumerate((packed[: len(packed) // 2], b"no such archive" * 9)):
        file = tmp_path / f"{number}.jsonl{ending}"
        file.write_bytes(content)
        for read in (in_blocks, whole):
            with pytest.raises(UserError, match=f"{file.name} is damaged or cut short"):
                read(file)


def test_members_of_a_compressed_file_are_read_one_after_the_other(tmp_path: Path) -> None:
    for ending, pack in PACKERS.items():
        file = tmp_path / f"a.jsonl{ending}"
        file.write_bytes(pack(b'{"a": 1}\n') + pack(b'{"a": 2}\n'))
        assert in_blocks(file)[0] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("documents", "wanted", "places"),
    [
        ("line", ["one", "two", "three", "four "], ["t.txt line 1", "t.txt line 2", "t.txt line 4", "t.txt line 8"]),
        ("blank_line", ["one\ntwo", "three", "four \n"], ["t.txt document 1", "t.txt document 2", "t.txt document 3"]),
        (Separated(separator="e\n"), ["on", "two\n\nthre", " \n\n\nfour \n"], None),
    ],
)
def test_a_text_file_is_divided_into_documents(
    tmp_path: Path, documents: Documents, wanted: list[str], places: list[str] | None
) -> None:
    file = tmp_path / "t.txt"
    file.write_text("one\ntwo\n\nthree\n \n\n\nfour \n")
    rows, found, _ = in_blocks(file, documents)
    assert [row["text"] for row in rows] == wanted
    assert places is None or found == places
    assert whole(file, documents) == (rows, found)


def test_a_file_that_is_one_document_keeps_its_line_ends_in_blocks_too(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes(b"one\r\ntwo\r\n")
    assert in_blocks(file)[0] == whole(file)[0] == [{"text": "one\r\ntwo\r\n"}]


def test_separators_are_found_wherever_reading_cuts_the_text(tmp_path: Path) -> None:
    parts = [f"part {number}" * 7000 for number in range(100)]
    file = tmp_path / "t.txt"
    file.write_text("\n \n\n".join(parts))
    assert [row["text"] for row in in_blocks(file, "blank_line")[0]] == parts
    file.write_text("<|end|>".join(parts))
    assert [row["text"] for row in in_blocks(file, Separated(separator="<|end|>"))[0]] == parts


def test_a_pattern_and_a_folder_of_compressed_shards_are_one_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (ending, pack) in enumerate(PACKERS.items()):
        (tmp_path / f"shard-{number}.jsonl{ending}").write_bytes(pack(json.dumps({"a": number}).encode()))
    (tmp_path / "other.jsonl").write_text('{"a": 9}')
    monkeypatch.chdir(tmp_path)
    for path in ("shard-*", f"{tmp_path}/shard-?.jsonl.*"):
        rows = open_rows(path, "f")
        assert rows.read(0, 9) == [{"a": 0}, {"a": 1}, {"a": 2}, {"a": 3}]
        assert rows.where(1) == "shard-1.jsonl.bz2 line 1"
    assert len(open_rows(str(tmp_path), "f")) == 5
    with pytest.raises(UserError, match="matches no file"):
        open_rows("shard-*.csv", "f")


def test_a_pattern_that_matches_nothing_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"")
    assert not list(missing("f", tmp_path / "*.csv.gz"))
    (found,) = missing("f", tmp_path / "b*.csv")
    assert found.why.endswith("b*.csv matches no file")
