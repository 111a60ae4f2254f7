from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data.encodings import guess_encoding
from drivetrain.data.tables import column, place_of, read_table
from drivetrain.errors import UserError
from tests.properties import examples


def table(folder: Path, name: str, content: str | bytes, **options: Any) -> list[list[Any]]:
    """The columns' names, then the rows."""
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    frame = read_table(str(file), "workload.data.train", **options)
    return [list(frame.columns), *frame.values.tolist()]


def refusal(folder: Path, name: str, content: str | bytes) -> str:
    with pytest.raises(UserError) as caught:
        table(folder, name, content)
    assert caught.value.problems[0].field == "workload.data.train"
    return str(caught.value)


READ = {
    "plain": ("a.csv", "label,text\n1,good\n0,bad\n", [["1", "good"], ["0", "bad"]]),
    "byte order mark, CRLF and quotes": (
        "a.csv",
        b'\xef\xbb\xbflabel,text\r\n1,"a ""q"", b"\r\n0,"two\nlines"\r\n',
        [["1", 'a "q", b'], ["0", "two\nlines"]],
    ),
    "texts that look like missing values": (
        "a.csv",
        "label,text\n1,NA\n0,null\n1,nan\n",
        [["1", "NA"], ["0", "null"], ["1", "nan"]],
    ),
    "numbers keep their zeros": ("a.csv", "label,text\n01,1.50\n", [["01", "1.50"]]),
    "blank lines": ("a.csv", "label,text\n\n1,good\n\n", [["1", "good"]]),
    "separators at the end of the line": ("a.csv", "label,text\n1,good,\n", [["1", "good"]]),
    "old Mac line ends": ("a.csv", "label,text\r1,good\r", [["1", "good"]]),
    "TSV": ("a.tsv", "label\ttext\n1\tgood, very\n", [["1", "good, very"]]),
    "TSV whose quotes mean nothing": (
        "a.tsv",
        'label\ttext\n1\t"good\n0\tbad\n1\t"nice\n0\t"so" "so"\n',
        [["1", '"good'], ["0", "bad"], ["1", '"nice'], ["0", '"so" "so"']],
    ),
    "TSV with quoted lines": (
        "a.tsv",
        'label\ttext\n1\t"two\nlines"\n0\t"a ""q"""\n',
        [["1", "two\nlines"], ["0", 'a "q"']],
    ),
    "JSON lines": (
        "a.jsonl",
        '{"label": 1, "text": "a\\nb"}\n\n{"label": 0, "text": "\u2028"}\n',
        [[1, "a\nb"], [0, "\u2028"]],
    ),
    "JSON list": ("a.json", '[{"label": "x", "text": "NA"}]', [["x", "NA"]]),
    "JSON list under data": ("a.json", '{"version": 1, "data": [{"label": "x", "text": "y"}]}', [["x", "y"]]),
    "JSON lines by another name": (
        "a.json",
        '{"label": 1, "text": "y"}\n{"label": 0, "text": "z"}\n',
        [[1, "y"], [0, "z"]],
    ),
}


@pytest.mark.parametrize(("name", "content", "rows"), READ.values(), ids=READ)
def test_files_are_read_as_people_write_them(
    tmp_path: Path, name: str, content: str | bytes, rows: list[list[Any]]
) -> None:
    assert table(tmp_path, name, content) == [["label", "text"], *rows]


def test_an_index_column_of_pandas_does_no_harm(tmp_path: Path) -> None:
    pd.DataFrame({"label": [1, 0], "text": ["good", "bad"]}).to_csv(tmp_path / "a.csv")
    frame = read_table(str(tmp_path / "a.csv"), "F")
    assert column(frame, "text", "a.csv", "F").tolist() == ["good", "bad"]


def test_without_a_header_columns_go_by_position(tmp_path: Path) -> None:
    assert table(tmp_path, "a.csv", "1,good\n0,bad\n", header=False) == [[0, 1], ["1", "good"], ["0", "bad"]]


def test_parquet_keeps_its_columns(tmp_path: Path) -> None:
    pd.DataFrame({"label": [1, 0], "text": ["NA", "bad"]}).to_parquet(tmp_path / "a.parquet")
    frame = read_table(str(tmp_path / "a.parquet"), "F")
    assert frame.values.tolist() == [[1, "NA"], [0, "bad"]]


def test_a_long_field_is_no_limit(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    assert len(table(tmp_path, "a.csv", f"text\n{'x' * 200_000}\n")[1][0]) == 200_000
    assert csv.field_size_limit() == before


REFUSED = {
    "an unquoted comma in a text": ("a.csv", "label,text\n1,good, but small\n0,bad\n", ["line 2 has 3", "quote"]),
    "a row cut short": ("a.csv", "label,text\n1,good\n0\n", ["line 3 has 1 column ('0') where the first has 2"]),
    "rows of many lengths": (
        "a.csv",
        "label,text\n" + "1,good\n0\n" * 7,
        ["line 3 has 1 column ('0'), line 5 has", "where the first has 2, and 2 more lines are wrong"],
    ),
    "a quote that is never closed": ("a.csv", 'label,text\n1,"good\n0,bad\n', ["line 3", "quote"]),
    "two stray quotes that would join rows": ("a.csv", 'label,text\n1,"good\n0,bad\n1,"nice\n', ["line 4", "quote"]),
    "empty": ("a.csv", "", ["is empty"]),
    "header only": ("a.csv", "label,text\n", ["no rows"]),
    "blank lines only": ("a.csv", "\n\n", ["blank lines only"]),
    "broken JSON line": ("a.jsonl", '{"a": 1}\n{a}\n', ["line 2 is broken JSON"]),
    "all broken JSON lines": (
        "a.jsonl",
        '{"a": 1}\n{a}\n{"a": 2}\n[]\n{"a": "\\ud800"}\n',
        ["line 2 is broken JSON", "line 4 holds no object", "line 5 holds half a surrogate pair"],
    ),
    "JSON line without an object": ("a.jsonl", "[1]\n", ["line 1 holds no object"]),
    "JSON without a list": ("a.json", '{"a": 1}', ["no list of objects"]),
    "no parquet": ("a.parquet", "label,text", ["cannot be read"]),
    "unknown ending": ("a.xlsx", "x", ["ends in .xlsx", ".csv, .tsv, .jsonl"]),
    "GBK": ("a.csv", "label,text\n1,房间很好，服务不错\n".encode("gbk"), ["line 2", "GB18030", "iconv -f GB18030"]),
    "Latin-1": ("a.csv", "label,text\n1,très bien\n".encode("latin-1"), ["line 2", "WINDOWS-1252"]),
    "UTF-16": ("a.csv", "label,text\n1,好\n".encode("utf-16"), ["UTF-16"]),
}


@pytest.mark.parametrize(("name", "content", "words"), REFUSED.values(), ids=REFUSED)
def test_broken_files_are_refused_with_the_place(
    tmp_path: Path, name: str, content: str | bytes, words: list[str]
) -> None:
    message = refusal(tmp_path, name, content)
    assert all(part in message for part in words), message


def test_a_missing_file_and_a_folder_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reviews\.csv does not exist"):
        read_table("reviews.csv", "F")
    with pytest.raises(UserError, match="is a folder"):
        read_table(str(tmp_path), "F")


FRAME = pd.DataFrame([["1", "good", ["a"]]], columns=["label", "review", "tokens"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reveiw", "did you mean review"),
        ("x", "it has: label, review, tokens"),
        (3, "3 columns, so none at position 3"),
        (-1, "position -1"),
        ("tokens", "holds lists"),
    ],
)
def test_a_column_that_does_not_serve_is_refused(name: str | int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        column(FRAME, name, "a.csv", "workload.data.text_column")


def test_a_name_that_two_columns_share_is_refused() -> None:
    twice = pd.DataFrame([["1", "2"]], columns=["text", "text"])
    with pytest.raises(UserError, match="2 columns 'text'"):
        column(twice, "text", "a.csv", "F")
    assert column(twice, 1, "a.csv", "F").tolist() == ["2"]


def test_the_encoding_of_chinese_and_of_european_texts_is_guessed() -> None:
    chinese = "入住两晚，前台态度很好，房间干净，早餐也不错。" * 5
    french = "Très bon hôtel, le petit déjeuner était délicieux et la chambre bien située."
    assert guess_encoding(chinese.encode("gb18030")) == "GB18030"
    assert guess_encoding("櫃檯的態度很好，房間乾淨".encode("big5")) == "BIG5"
    assert guess_encoding(french.encode("cp1252")) == "WINDOWS-1252"


# a carriage return alone is a line end to some writers and text to others; surrogates cannot be written at all
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), max_size=20)
rows_of_texts = st.lists(st.tuples(st.integers(0, 9).map(str), texts), min_size=1, max_size=8)


@settings(deadline=None, max_examples=examples(60))
@given(rows_of_texts, st.sampled_from([".csv", ".tsv"]), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_what_a_csv_writer_wrote_is_read_back(
    rows: list[tuple[str, str]], suffix: str, line_end: str, everything_quoted: bool
) -> None:
    written = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if everything_quoted else csv.QUOTE_MINIMAL
    delimiter = "\t" if suffix == ".tsv" else ","
    writer = csv.writer(written, delimiter=delimiter, lineterminator=line_end, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([("label", "text"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        assert table(Path(folder), f"a{suffix}", written.getvalue())[1:] == [list(row) for row in rows]


@settings(deadline=None, max_examples=examples(30))
@given(rows_of_texts)
def test_json_lines_are_read_back(rows: list[tuple[str, str]]) -> None:
    lines = "\n".join(json.dumps({"label": label, "text": text}, ensure_ascii=False) for label, text in rows)
    with tempfile.TemporaryDirectory() as folder:
        assert table(Path(folder), "a.jsonl", lines)[1:] == [list(row) for row in rows]


def test_a_gbk_table_has_a_cure_for_excel_and_a_name_that_its_owner_knows(tmp_path: Path) -> None:
    message = refusal(tmp_path, "a.csv", "label,text\n1,房间很好，服务不错\n".encode("gbk"))
    assert "it looks like GBK (GB18030)" in message
    assert "or in Excel: Save As, CSV UTF-8" in message


@pytest.mark.parametrize(("mark", "shown"), [(";", "';'"), ("\t", "tabs"), ("|", "'|'")])
def test_another_separator_is_named_where_columns_are_missing_or_rows_too_wide(
    tmp_path: Path, mark: str, shown: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"text{mark}label\ngood{mark}1\n")
    names = list(read_table(str(path), "field").columns)
    with pytest.raises(UserError, match=f"has no column 'text'\n    its columns look separated by {re.escape(shown)}"):
        place_of(names, "text", str(path), "field")
    path.write_text(f"text{mark}label\ngood, clean{mark}1\n")
    with pytest.raises(UserError, match=f"line 2 has 2 columns .* look separated by {re.escape(shown)}"):
        read_table(str(path), "field")
    path.write_text(f"text{mark}label,number\ngood\n")
    with pytest.raises(UserError, match=r"line 2 has 1 column .*where the first has 2") as caught:
        read_table(str(path), "field")
    assert "look separated" not in str(caught.value)
