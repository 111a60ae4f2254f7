"""Texts of a table on disk: the same rows as a whole reading gives, read once, and nothing wrong kept."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from drivetrain.config.workload import TextData
from drivetrain.data import table_blocks, text_rows
from drivetrain.data.texts import Texts, num_shared, read_texts
from drivetrain.errors import UserError
from drivetrain.runtime import progress_line
from tests.properties import examples

TEXTS = some.text(some.characters(exclude_categories=["Cs"], exclude_characters="\x00\r"), max_size=12)


def read(path: Path, **given: Any) -> Texts:
    data = {"train": str(path), "cache": path.parent / "cache", "bad_rows": 0.99, **given}
    return read_texts(TextData.model_validate(data), str(path), "workload.data.train")


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=some.lists(TEXTS, min_size=1, max_size=9), block=some.integers(1, 4), ending=some.sampled_from(["csv", "tsv"])
)
def test_any_text_that_csv_can_hold_comes_back_with_its_row_number(
    texts: list[str], block: int, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_blocks, "ROWS", block)
    path = tmp_path / f"a.{ending}"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter={"csv": ",", "tsv": "\t"}[ending], quoting=csv.QUOTE_ALL)
        writer.writerows([["text", "label"], *([text, "x"] for text in [*texts, "last"])])
    found = read(path)
    expected = [(number, text) for number, text in enumerate([*texts, "last"], start=1) if text.strip()]
    assert list(zip(found.rows.tolist(), found.first, strict=True)) == expected


VALUES = {
    "a gap among whole numbers": [1, None, 3],
    "whole floats": [1.0, 2.0, 3.0],
    "some with digits behind the point": [1, 2.5, None],
    "texts and numbers": ["a", 1, 2.0],
    "truth values": [True, False, None],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("block", [1, 2048])
def test_json_values_become_the_texts_that_pandas_makes_of_their_column(
    values: list[Any], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_blocks, "ROWS", block)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"label": 0, "text": value}) + "\n" for value in values))
    column = pd.DataFrame({"text": values})["text"]
    if pd.api.types.is_float_dtype(column) and (column.dropna() % 1 == 0).all():
        column = column.astype("Int64")
    expected = [str(value) for value in column.astype(object) if not pd.isna(value)]
    assert list(read(path).first) == expected


def test_parquet_in_many_row_groups_gives_its_texts_and_labels(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"text": [f"text {n}" for n in range(50)], "label": [n % 3 if n % 7 else 2.0 for n in range(50)]}
    )
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=7)
    found = read(tmp_path / "a.parquet")
    assert list(found.first) == frame.text.tolist()
    assert found.labels.tolist() == [str(int(value)) for value in frame.label]


def test_a_second_reading_opens_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\ngood,1\nbad,0\n")
    first = read(path)
    monkeypatch.delattr(text_rows, "open_table")
    assert list(read(path).first) == list(first.first) == ["good", "bad"]


@pytest.mark.parametrize("sets_time_back", [True, False])
def test_an_edit_that_keeps_the_length_is_found(tmp_path: Path, sets_time_back: bool) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\ngood,1\nbad,0\n")
    before, _ = path.stat(), read(path)
    path.write_text("text,label\ngold,1\nbad,0\n")
    if sets_time_back:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list(read(path).first) == ["gold", "bad"]


def test_a_file_that_changes_while_it_is_read_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = tmp_path / "a.csv", table_blocks._Separated.blocks

    def blocks(self: Any, places: Any) -> Any:
        yield from original(self, places)
        with path.open("a") as file:
            file.write("late,1\n")

    path.write_text("text,label\ngood,1\nbad,0\n")
    monkeypatch.setattr(table_blocks._Separated, "blocks", blocks)
    with pytest.raises(UserError, match="changed while it was read"):
        read(path)
    monkeypatch.setattr(table_blocks._Separated, "blocks", original)
    assert list(read(path).first) == ["good", "bad", "late"]


@pytest.mark.parametrize(
    "content", [b"text,label\n" + b"good,1\n" * 5000 + b"b\xe9,0\n", b'text,label\n"open,1\nb\xe9,0\n']
)
def test_a_wrong_encoding_is_named_with_its_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"not UTF-8: line {content.count(10)} cannot be read"):
        read(path)


def test_a_damaged_store_is_made_again_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\ngood,1\nbad,0\n")
    read(path)
    (store,) = (tmp_path / "cache").glob("rows-*[!k]")
    (store / "first").write_bytes(b"mood" + b"bad")
    found = read(path)
    assert list(found.first) == ["good", "bad"]
    assert found.warning is not None
    assert "was damaged" in found.warning
    assert read(path).warning is None


def test_texts_that_two_files_share_are_counted_pairs_as_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,other,label\na,bc,1\nd,e,0\n")
    (tmp_path / "b.csv").write_text("text,other,label\nab,c,1\nd,e,0\na,bc,1\n")
    one, two = (read(tmp_path / name, text_pair_column="other") for name in ("a.csv", "b.csv"))
    assert num_shared(one, two) == 2
    assert num_shared(one, two.take(np.array([0, 1]))) == 1


def test_shards_of_every_format_and_compression_are_the_rows_of_one_file(tmp_path: Path) -> None:
    rows = [{"text": f'room {number}\n"quoted" é', "label": "ab"[number % 2]} for number in range(60)]
    rows[33]["text"] = " "
    pd.DataFrame(rows).to_csv(tmp_path / "whole.csv", index=False)
    folder = tmp_path / "shards"
    folder.mkdir()
    pd.DataFrame(rows[:10]).to_csv(folder / "a.csv", index=False)
    pd.DataFrame(rows[10:20]).to_csv(folder / "b.csv.gz", index=False)
    pd.DataFrame(rows[20:30]).to_csv(folder / "c.tsv.bz2", index=False, sep="\t")
    pd.DataFrame(rows[30:40]).to_json(folder / "d.jsonl.xz", orient="records", lines=True)
    pd.DataFrame(rows[40:50]).to_json(folder / "e.json", orient="records")
    pd.DataFrame(rows[50:])[["label", "text"]].to_parquet(folder / "f.parquet")
    wanted = read(tmp_path / "whole.csv")
    for path in (folder, folder / "*"):
        found = read(path, cache=tmp_path / "cache")
        assert list(found.first) == list(wanted.first)
        assert found.labels.tolist() == wanted.labels.tolist()
        assert found.rows.tolist() == wanted.rows.tolist()
        assert [bad.where for bad in found.bad] == ["line 4 (row 4) of d.jsonl.xz"]


def test_a_shard_without_the_columns_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nx,1\n")
    (tmp_path / "b.csv").write_text("words,label\ny,2\n")
    with pytest.raises(UserError, match=r"b\.csv has no column 'text'"):
        read(tmp_path / "*.csv", cache=tmp_path / "cache")
    (tmp_path / "b.csv.gz").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"b\.csv\.gz is damaged or cut short"):
        read(tmp_path / "b.csv.gz")
    (tmp_path / "c.json").write_text('{"text": "x", "label": "1"}')
    with pytest.raises(UserError, match=r"c\.json holds no list of objects"):
        read(tmp_path / "c.json")


def test_slices_of_mapped_texts_are_those_of_a_list() -> None:
    texts = ["a", "", "é", "房间", "b"]
    encoded = [text.encode() for text in texts]
    content, ends = np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([len(each) for each in encoded])
    mapped = text_rows.MappedTexts(content, ends)
    for start in range(-6, 7):
        for stop in range(-6, 7):
            for step in (1, 2, -1):
                assert mapped[start:stop:step] == texts[start:stop:step]
    assert mapped.taken(np.array([3, 0]))[0:2] == ["房间", "a"]


def test_a_long_reading_says_how_far_it_is_and_how_long_it_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 11  # seconds: each look is one at which a line is due
            return self.now

    monkeypatch.setattr(progress_line, "time", Clock())
    monkeypatch.setattr(table_blocks, "ROWS", 100)
    text = "x" * 9_980
    (tmp_path / "long.csv").write_text("text,label\n" + f"{text},good\n{text},bad\n" * 200)  # 4 MB
    read_texts(TextData(train="long.csv", cache=tmp_path / "cache"), str(tmp_path / "long.csv"), "workload.data.train")
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"reading {tmp_path / 'long.csv'}: ") and " left" in line for line in lines)
    assert [line.split(": ")[1].split(",")[0] for line in lines] == [f"{done} of 4 MB" for done in (1, 2, 3, 4, 4)]
