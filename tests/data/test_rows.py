from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from drivetrain.data.rows import open_rows
from drivetrain.errors import UserError


def rows(path: Path, **options: Any) -> list[dict[str, Any]]:
    opened = open_rows(str(path), "workload.data.train", **options)
    return opened.read(0, len(opened))


def places(path: Path, **options: Any) -> list[str]:
    opened = open_rows(str(path), "F", **options)
    return [opened.where(index) for index in range(len(opened))]


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        open_rows(str(path), "workload.data.train", **options)
    assert caught.value.problems[0].field == "workload.data.train"
    return str(caught.value)


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "expected", "place"),
    [
        ("a.json", '[{"a": 1}, {"b": null}]', [{"a": 1}, {"b": None}], "a.json row 2"),
        ("a.JSONL", '{"a": 1}\n{"b": null}', [{"a": 1}, {"b": None}], "a.JSONL line 2"),
        ("a.ndjson", '\n{"a": 1}\r\n \n{"b": null}\n', [{"a": 1}, {"b": None}], "a.ndjson line 4"),
        ("a.csv", "a,b\r\n1,NA\r\n,\u00e9\r\n", [{"a": "1", "b": "NA"}, {"a": "", "b": "\u00e9"}], "a.csv row 2"),
        ("a.tsv", "a\tb\n1\tx y\n2\t\n", [{"a": "1", "b": "x y"}, {"a": "2", "b": ""}], "a.tsv row 2"),
        ("a.txt", "one\r\ntwo\n", [{"text": "one\r\ntwo\n"}], "a.txt"),
        ("a.md", b"\xef\xbb\xbf# one", [{"text": "# one"}], "a.md"),
    ],
)
def test_every_ending_gives_the_rows_as_they_were_written(
    tmp_path: Path, name: str, content: str | bytes, expected: list[dict[str, Any]], place: str, stream: bool
) -> None:
    file = write(tmp_path / name, content)
    assert rows(file, stream=stream) == expected
    assert places(file, stream=stream)[-1] == place


@pytest.mark.parametrize("stream", [False, True])
def test_a_folder_is_one_data_set_in_the_order_of_its_names(tmp_path: Path, stream: bool) -> None:
    write(tmp_path / "b.jsonl", '{"n": 3}\n{"n": 4}\n')
    write(tmp_path / "a" / "one.json", '[{"n": 1}, {"n": 2}]')
    write(tmp_path / "c.jsonl", "\n")  # no rows, which does no harm beside others
    pd.DataFrame({"n": [5, 6, 7]}).to_parquet(tmp_path / "d.parquet", row_group_size=2)
    write(tmp_path / "e.txt", "text")
    for beside in ("README.md", "dataset_info.json", ".hidden.txt", ".cache/x.txt", "notes.pdf"):
        write(tmp_path / beside, "{}")
    expected = [*({"n": n} for n in range(1, 8)), {"text": "text"}]
    assert rows(tmp_path, stream=stream) == expected
    files = ["a/one.json row 1", "a/one.json row 2", "b.jsonl line 1", "b.jsonl line 2"]
    assert places(tmp_path, stream=stream) == [*files, *(f"d.parquet row {n}" for n in (1, 2, 3)), "e.txt"]
    opened = open_rows(str(tmp_path), "F", stream=stream)
    for start in range(9):
        for stop in range(start, 12):
            assert opened.read(start, stop) == expected[start:stop]


def test_the_broken_files_of_a_folder_are_named_at_once(tmp_path: Path) -> None:
    write(tmp_path / "good.jsonl", '{"n": 1}\n')
    write(tmp_path / "a.json", "[1]")
    write(tmp_path / "b.jsonl", "{\n")
    write(tmp_path / "c.csv", "")
    words = refusal(tmp_path)
    assert "a.json cannot be read: row 1 holds no object" in words
    assert "b.jsonl cannot be read: line 1 is broken JSON" in words
    assert "c.csv is empty" in words
    for number in range(9):
        write(tmp_path / f"d{number}.json", "")
    assert "and 7 more files cannot be read" in refusal(tmp_path)


GBK = "label,text\n1,房间很好，服务不错\n".encode("gbk")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "", "a.json is empty"),
        ("a.json", "[]", "a.json has no rows"),
        ("a.jsonl", " \n\n", "a.jsonl has no rows"),
        ("a.csv", "a,b\n", "a header but no rows"),
        ("a.csv", "a,a\n1,2\n", "two columns 'a'"),
        ("a.csv", "a,b\n1,2,3\n", "line 2 has 3 columns"),
        ("a.csv", GBK, "line 2 cannot be read; it looks like GBK (GB18030)"),
        ("a.txt", GBK, "a.txt is not UTF-8: line 2"),
        ("a.xlsx", "x", "ends in .xlsx\n    files may end in .json, .jsonl"),
        ("name", "x", "ends in nothing"),
    ],
)
def test_a_file_that_cannot_serve_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    assert words in refusal(write(tmp_path / name, content))


def test_paths_that_are_not_there_are_distinguished_from_hub_ids(tmp_path: Path) -> None:
    for path in ("rows.arrow", "folder/rows.md", "./a", "a/b/c", str(tmp_path / "x")):
        assert "does not exist" in refusal(path)


def test_a_folder_without_data_and_one_of_several_splits_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "README.md", "about")
    assert "no file that can be read" in refusal(tmp_path)
    write(tmp_path / "dataset_dict.json", json.dumps({"splits": ["train", "test"]}))
    for split in ("train", "test"):
        write(tmp_path / split / "a.json", '[{"n": 1}]')
    assert "holds several splits\n    give the folder of one: test, train" in refusal(tmp_path)
    assert rows(tmp_path / "test") == [{"n": 1}]


def test_parts_of_hub_data_sets_are_not_looked_for_in_files(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", '[{"n": 1}]')
    words = refusal(file, split="test", subset="en")
    assert "is here as a file, without any subset en or split test" in words
    assert "a folder, without any folder x" in refusal(tmp_path, folder="x")


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path, *_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    file = write(tmp_path / "a.json", '[{"n": 1}]')
    monkeypatch.setattr(Path, "open", forbidden)  # file modes do not bind every user
    assert "a.json cannot be read: Permission denied" in refusal(file)


def test_a_folder_with_data_that_would_be_passed_over_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in ("data", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"a": 1}\n')
    folder = tmp_path / "data"
    (folder / "good.jsonl").symlink_to(tmp_path / "elsewhere" / "a.jsonl")
    assert len(open_rows(str(folder), "F")) == 2
    (folder / "b.jsonl.zip").write_bytes(b"")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "broken.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError) as caught:
        open_rows(str(folder), "F")
    words = str(caught.value)
    assert "b.jsonl.zip (an archive), broken.jsonl (a link that leads nowhere), linked (a link to a folder)" in words


def test_a_saved_data_set_is_the_files_it_names(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2]})
    for name in ("data-00000-of-00001.arrow", "cache-0123.arrow"):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert len(open_rows(str(tmp_path), "F")) == 2
    state.write_text("{}")
    with pytest.raises(UserError, match="does not name the files"):
        open_rows(str(tmp_path), "F")
