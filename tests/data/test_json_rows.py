from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data.rows import Rows, open_rows
from drivetrain.errors import UserError
from tests.properties import examples


def opened(folder: Path, name: str, content: str | bytes, stream: bool = False) -> Rows:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_rows(str(file), "workload.data.train", stream=stream)


def refusal(folder: Path, name: str, content: str | bytes) -> str:
    """The same said when the file is opened as when its rows are read from a stream."""
    with pytest.raises(UserError) as caught:
        opened(folder, name, content)
    if name.endswith(".jsonl"):
        streamed = opened(folder, name, content, stream=True)
        with pytest.raises(UserError) as caught_later:
            streamed.read(0, len(streamed))
        assert str(caught_later.value) == str(caught.value)
    return str(caught.value)


JSON_FILES = {
    "a list": '[{"a": 1}, {}]',
    "a list under data": '{"version": 1, "data": [{"a": 1}, {}]}',
    "JSON Lines by another name": '{"a": 1}\n\n{}\n',
    "byte order mark and CRLF": b'\xef\xbb\xbf[{"a": 1},\r\n{}]\r\n',
}


@pytest.mark.parametrize("content", JSON_FILES.values(), ids=JSON_FILES)
def test_json_files_are_read_as_people_write_them(tmp_path: Path, content: str | bytes) -> None:
    assert opened(tmp_path, "a.json", content).read(0, 9) == [{"a": 1}, {}]


REFUSED = {
    "broken JSON": ("a.json", '[{"a": 1},\n {"a" 2}]', ["a.json is broken JSON at line 2, column 7: Expecting ':'"]),
    "a JSON file cut short": ("a.json", '[{"a": 1},\n {"a": "tex', ["line 2", "Unterminated string"]),
    "an object": ("a.json", '{"a": 1}', ["no list of objects", '{"data": [...]}']),
    "two lists": ("a.json", '{"data": [{}], "test": [{}]}', ["no list of objects"]),
    "a list by another key": ("a.json", '{"rows": [{}]}', ["no list of objects"]),
    "rows that are no objects": ("a.json", '[{}, 1, [], "x", null, 2, 3]', ["row 2 holds no", "row 6", "; and 1 more"]),
    "too deep": ("a.json", "[" * 100_000, ["cannot be read as JSON"]),
    "a number of too many digits": ("a.json", "[{}, " + "1" * 5000 + "]", ["cannot be read as JSON"]),
    "half a surrogate pair": (
        "a.json",
        '[{"a": "\\ud83d\\ude00"}, {"a": ["\\uD83D"]}]',
        ["row 2 holds half", "\\ud83d"],
    ),
    "not UTF-8": ("a.json", '[\n{"a": "tr\u00e8s"}]'.encode("latin-1"), ["line 2", "iconv -f WINDOWS-1252"]),
    "UTF-16": ("a.json", '[{"a": 1}]'.encode("utf-16"), ["looks like UTF-16"]),
    "broken lines": (
        "a.jsonl",
        '{"a": 1}\n{a}\n\n[]\n{"a": "\\udc00"}\n' + "x\n" * 7,
        ["line 2 is broken JSON: Expecting property", "(column 2)", "line 4 holds no", "line 7", "; and 5 more"],
    ),
    "a line cut short": ("a.jsonl", '{"a": 1}\n{"a": "te', ["line 2 is broken JSON: Unterminated string"]),
    "a line too deep": ("a.jsonl", "{}\n" + "[" * 100_000 + "\n", ["line 2 is nested too deeply"]),
    "lines that are not UTF-8": ("a.jsonl", b'{}\n\n{"a": "\xe8"}\n', ["a.jsonl is not UTF-8: line 3"]),
}


@pytest.mark.parametrize(("name", "content", "words"), REFUSED.values(), ids=REFUSED)
def test_broken_json_is_refused_with_the_place(
    tmp_path: Path, name: str, content: str | bytes, words: list[str]
) -> None:
    message = refusal(tmp_path, name, content)
    assert all(part in message for part in words), message


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    content = '{"a": "\u2028\x85"}\n{"a": 2}'
    for stream in (False, True):
        assert opened(tmp_path, "a.jsonl", content, stream).read(0, 9) == [{"a": "\u2028\x85"}, {"a": 2}]


def many_lines(folder: Path) -> tuple[Path, list[dict[str, int]]]:
    """3,500 rows, with a blank line before every seventh."""
    expected = [{"n": n} for n in range(3_500)]
    blank = ("\n" if n % 7 == 0 else "" for n in range(3_500))
    file = folder / "many.jsonl"
    file.write_text("".join(f"{before}{json.dumps(row)}\n" for before, row in zip(blank, expected, strict=True)))
    return file, expected


def test_a_stream_gives_any_range_at_its_line(tmp_path: Path) -> None:
    file, expected = many_lines(tmp_path)
    streamed, whole = open_rows(str(file), "F", stream=True), open_rows(str(file), "F")
    assert len(streamed) == 3_500
    for start, stop in [(0, 10), (10, 1_200), (2_999, 3_001), (990, 1_010), (1_010, 1_020), (3_490, 4_000), (5, 5)]:
        assert streamed.read(start, stop) == expected[start:stop]
    for index in (0, 999, 1_000, 3_499):
        assert streamed.where(index) == whole.where(index) == f"many.jsonl line {index + index // 7 + 2}"


def test_reading_on_in_a_stream_does_not_start_again(tmp_path: Path) -> None:
    file, expected = many_lines(tmp_path)
    streamed = open_rows(str(file), "F", stream=True)
    streamed.read(0, 1_500)
    behind = file.read_bytes().index(json.dumps(expected[1_499]).encode())
    with file.open("r+b") as damaged:
        damaged.write(b"\n" * behind)  # whoever counts lines from any place before loses count
    assert streamed.read(1_500, 1_600) == expected[1_500:1_600]


def test_a_stream_whose_file_shrank_says_so(tmp_path: Path) -> None:
    file, expected = many_lines(tmp_path)
    streamed = open_rows(str(file), "F", stream=True)
    assert len(streamed) == len(expected)
    file.write_text('{"n": 0}\n')
    with pytest.raises(UserError, match="fewer lines than when it was opened"):
        streamed.read(0, 10)


# no surrogates, which are no characters
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=6,
)
objects = st.lists(st.dictionaries(st.text("abc", max_size=2), values, max_size=3), min_size=1, max_size=8)


@settings(deadline=None, max_examples=examples(60))
@given(objects, st.data(), st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n", " \n \t\n"]))
def test_what_was_written_is_read_back_whole_and_in_a_stream(
    written: list[dict[str, Any]], data: st.DataObject, mark: bool, ascii_only: bool, line_end: str
) -> None:
    lines = line_end.join(json.dumps(row, ensure_ascii=ascii_only) for row in written)
    content = lines.encode("utf-8-sig" if mark else "utf-8")
    with tempfile.TemporaryDirectory() as folder:
        streamed = opened(Path(folder), "a.jsonl", content, stream=True)
        whole = opened(Path(folder), "a.jsonl", content)
        for _ in range(4):
            start = data.draw(st.integers(0, len(written)))
            stop = data.draw(st.integers(start, len(written) + 2))
            assert streamed.read(start, stop) == whole.read(start, stop) == written[start:stop]
        assert [streamed.where(i) for i in range(len(written))] == [whole.where(i) for i in range(len(written))]
        assert opened(Path(folder), "a.json", json.dumps(written)).read(0, 99) == written
