from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from drivetrain.data.rows import open_rows
from drivetrain.errors import UserError

ROWS = [
    {"n": n, "messages": None if n % 3 == 2 else [{"role": "user", "content": f"text {n}"}] * (n % 3)}
    for n in range(20)
]
TABLE = pa.Table.from_pylist(ROWS)
WITH_DICTIONARY = pa.table({"n": range(20), "role": pa.array(["user", "tool"] * 10).dictionary_encode()})


def write(file: Path, form: str, table: Any = TABLE, compression: str | None = None) -> Path:
    """In pieces of three rows."""
    if form == "parquet":
        pq.write_table(table, file, row_group_size=3, compression=compression)
    elif form == "feather":
        pyarrow.feather.write_feather(table, str(file), compression="lz4", chunksize=3)
    else:
        writer = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.OSFile(str(file), "wb") as sink, writer(sink, table.schema, options=options) as opened:
            for batch in table.to_batches(max_chunksize=3):
                opened.write_batch(batch)
    return file


FORMS = [
    ("a.parquet", "parquet", "zstd"),
    ("a.arrow", "file", None),
    ("a.arrow", "file", "zstd"),
    ("a.arrow", "stream", None),
    ("a.arrow", "stream", "lz4"),
    ("a.feather", "feather", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "form", "compression"), FORMS)
def test_any_range_of_rows_is_read_back(
    tmp_path: Path, name: str, form: str, compression: str | None, stream: bool
) -> None:
    opened = open_rows(str(write(tmp_path / name, form, TABLE, compression)), "F", stream=stream)
    assert len(opened) == 20
    for start, stop in [(0, 20), (0, 1), (2, 4), (4, 13), (19, 25), (7, 7), (1, 2), (20, 22)]:
        assert opened.read(start, stop) == ROWS[start:stop]
    assert opened.where(6) == f"{name} row 7"


def test_what_other_rows_have_inside_of_a_column_is_no_null_of_this_row(tmp_path: Path) -> None:
    """Arrow's structs have the fields of all rows: one call's arguments would be those of every call."""
    calls = [{"name": "add", "arguments": {"a": 1, "b": [{"c": 2}]}}, {"name": "tell", "arguments": {"text": "x"}}]
    rows = [{"call": call, "calls": [call], "note": None if n else "first"} for n, call in enumerate(calls)]
    for name, form in (("a.parquet", "parquet"), ("a.arrow", "file")):
        path = write(tmp_path / name, form, pa.Table.from_pylist(rows))
        assert open_rows(str(path), "F").read(0, 2) == rows


def test_a_map_is_an_object_with_the_keys_of_its_row(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.struct({"unit": pa.string(), "n": pa.int64()}))
    pairs = [[("a", {"unit": "m", "n": None}), ("b", None)], [("c", {"unit": None, "n": 1})]]
    path = write(tmp_path / "a.parquet", "parquet", pa.table({"map": pa.array(pairs, kind)}))
    assert open_rows(str(path), "F").read(0, 2) == [{"map": {"a": {"unit": "m"}, "b": None}}, {"map": {"c": {"n": 1}}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "form"), [("a.parquet", "parquet"), ("a.arrow", "file"), ("a.arrow", "stream")])
def test_columns_of_few_different_texts_are_texts(tmp_path: Path, name: str, form: str, stream: bool) -> None:
    opened = open_rows(str(write(tmp_path / name, form, WITH_DICTIONARY)), "F", stream=stream)
    assert opened.read(3, 5) == [{"n": 3, "role": "tool"}, {"n": 4, "role": "user"}]


def test_a_stream_reads_no_row_group_but_the_one_it_needs(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", "parquet")
    streamed = open_rows(str(file), "F", stream=True)
    column = pq.ParquetFile(file).metadata.row_group(2).column(0)  # rows 6 to 8
    with file.open("r+b") as damaged:
        damaged.seek(column.dictionary_page_offset or column.data_page_offset)
        damaged.write(b"\xff" * column.total_compressed_size)
    assert streamed.read(0, 6) == ROWS[:6]
    assert streamed.read(9, 20) == ROWS[9:]
    with pytest.raises(UserError, match=r"a\.parquet cannot be read at a\.parquet row 7"):
        streamed.read(5, 8)
    with pytest.raises(UserError, match=r"a\.parquet cannot be read: "):
        open_rows(str(file), "F")


def test_reading_on_in_a_row_group_does_not_read_it_again(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", "parquet")
    streamed = open_rows(str(file), "F", stream=True)
    assert streamed.read(0, 1) == ROWS[:1]
    file.unlink()
    assert streamed.read(1, 3) == ROWS[1:3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "form"), [("a.parquet", "parquet"), ("a.arrow", "file"), ("a.arrow", "stream")])
def test_a_file_cut_short_is_refused(tmp_path: Path, name: str, form: str, stream: bool) -> None:
    file = write(tmp_path / name, form)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=rf"{name} cannot be read: .*\n.*is the file whole"):
        open_rows(str(file), "F", stream=stream)


def test_other_content_and_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_text("label,text\n1,good\n")
        with pytest.raises(UserError, match=rf"{name} cannot be read"):
            open_rows(str(tmp_path / name), "F")
    twins = pa.table([[1], [2]], names=["a", "a"])
    for name, form in (("a.parquet", "parquet"), ("a.arrow", "stream")):
        for stream in (False, True):
            with pytest.raises(UserError, match="two columns 'a'"):
                open_rows(str(write(tmp_path / name, form, twins)), "F", stream=stream)


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    for name, form in (("a.parquet", "parquet"), ("a.arrow", "stream")):
        for stream in (False, True):
            with pytest.raises(UserError, match="has no rows"):
                open_rows(str(write(tmp_path / name, form, TABLE.slice(0, 0))), "F", stream=stream)
