"""Tables of texts → labelled texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.config.workload import TextData
from drivetrain.data.texts import class_names, encode, read_texts
from drivetrain.errors import UserError


def read(path: Path, text: str, labelled: bool = True, **settings: Any):  # type: ignore[no-untyped-def]
    path.write_text(text, encoding="utf-8")
    given = {"train": str(path), "text_column": "text", "label_column": "label", "cache": path.parent / "cache"}
    data = TextData(**(given | settings))
    return read_texts(data, str(path), "workload.data.train", labelled)


def test_rows_without_text_are_dropped_counted_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    found = read(path, 'text,label\ngood,1\n,0\n"  ",0\nbad,0\n', bad_rows=0.5)
    assert found.first == ["good", "bad"]
    assert found.labels.tolist() == ["1", "0"]
    assert found.rows.tolist() == [1, 4]
    assert [bad.where for bad in found.bad] == [f"line 3 (row 2) of {path}", f"line 4 (row 3) of {path}"]


@pytest.mark.parametrize(("given", "most"), [("drop", ", more than 5 %"), ("error", ""), (0.4, ", more than 40 %")])
def test_more_rows_without_text_than_may_be_left_out_are_refused(tmp_path: Path, given: Any, most: str) -> None:
    text, path = 'text,label\ngood,1\n,0\n"  ",0\nbad,0\n', tmp_path / "a.csv"
    with pytest.raises(UserError) as caught:
        read(path, text, bad_rows=given)
    why = f"2 of the 4 rows of {path} cannot be used{most}: 2 because it has no text (first line 3 (row 2) of {path})"
    assert why in str(caught.value)
    assert "give workload.data.bad_rows=0.5" in str(caught.value)
    assert read(path, text, labelled=False, bad_rows=given).first == ["good", "bad"]


def test_labels_that_a_gap_made_floats_are_whole_numbers_again(tmp_path: Path) -> None:
    assert read(tmp_path / "a.csv", "text,label\n,\ngood,1\nbad,0\n", bad_rows=0.5).labels.tolist() == ["1", "0"]


def test_pairs_keep_both_texts(tmp_path: Path) -> None:
    found = read(tmp_path / "a.csv", "text,other,label\na,b,x\nc,,y\n", text_pair_column="other")
    assert (found.first, found.second) == (["a", "c"], ["b", ""])


LACKING = 'text,label\n"good\nand cheap",1\nbad,\n,0\ncut\n\nfine,1\n'


def test_rows_without_text_label_or_column_are_left_out_and_named_by_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    found = read(path, LACKING, bad_rows=0.8)
    assert (list(found.first), found.labels.tolist(), found.rows.tolist()) == (
        ["good\nand cheap", "fine"],
        ["1", "1"],
        [1, 5],
    )
    lines = path.read_text().splitlines()
    assert [lines[number - 1] for number in (4, 5, 6)] == ["bad,", ",0", "cut"]
    assert [(bad.where, bad.why) for bad in found.bad] == [
        (f"line 4 (row 2) of {path}", "it has no label"),
        (f"line 5 (row 3) of {path}", "it has no text"),
        (f"line 6 (row 4) of {path}", "it has too few columns"),
    ]


def test_a_refusal_names_rows_of_every_kind_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "a.csv", LACKING, bad_rows="error")
    words = ["3 of the 5 rows", "1 because it has no text", "1 because it has no label", "it has too few columns"]
    assert all(part in str(caught.value) for part in words), str(caught.value)


def test_a_text_without_label_has_a_prediction_all_the_same(tmp_path: Path) -> None:
    assert list(read(tmp_path / "b.csv", LACKING, labelled=False).first) == ["good\nand cheap", "bad", "fine"]


def test_a_file_without_any_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no row of .* has both a text and a label"):
        read(tmp_path / "a.csv", "text,label\ngood,\n", bad_rows=1.0)


def test_a_file_without_any_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no row of .* has both a text and a label"):
        read(tmp_path / "a.csv", "text,label\n,1\n,0\n")


def test_classes_are_sorted_as_numbers_where_they_are(tmp_path: Path) -> None:
    assert class_names(["10", "9", "2", "9"], "f") == ["2", "9", "10"]
    assert class_names(["b", "a", "10"], "f") == ["10", "a", "b"]
    assert encode(np.array(["b", "a"]), ["a", "b"], str(tmp_path), "f").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("labels", "reported"), [(["1", "1"], "are of one class"), ([str(i) for i in range(3000)], "hardly classes")]
)
def test_labels_that_are_no_classes_are_refused(labels: list[str], reported: str) -> None:
    with pytest.raises(UserError, match=reported):
        class_names(labels, "workload.data.label_column")


def test_a_label_that_training_does_not_know_is_named() -> None:
    with pytest.raises(UserError, match="lack: 'c'"):
        encode(np.array(["a", "c"]), ["a", "b"], "test.csv", "workload.data.evaluation")


def test_a_stray_quote_that_swallows_lines_is_refused_and_is_not_one_short_row(tmp_path: Path) -> None:
    rows = "".join(f"{number},good,1\n" for number in range(600))
    with pytest.raises(UserError, match=r"line 602 has 2 columns .*where the first has 3 \(a quote that is not"):
        read(tmp_path / "a.csv", f'id,text,label\n{rows}"600,open,1\n{rows}1,the 5",0\n{rows}')


def test_a_short_row_does_not_give_the_quotes_of_a_tsv_a_meaning(tmp_path: Path) -> None:
    rows = ["good they say\t1", "cut", *["fine\t1"] * 20, '"bad\t0', *["nice\t1"] * 20, 'worse"\t0']
    found = read(tmp_path / "a.tsv", "\n".join(["text\tlabel", *rows]))
    assert list(zip(found.first, found.labels.tolist(), strict=True)) == [
        tuple(row.split("\t")) for row in rows if row != "cut"
    ]
    assert [bad.why for bad in found.bad] == ["it has too few columns"]


def test_quoted_texts_of_several_lines_in_a_tsv_are_one_row(tmp_path: Path) -> None:
    found = read(tmp_path / "a.tsv", 'text\tlabel\n"one\ntwo\nthree"\t1\nfine\t0\n')
    assert list(found.first) == ["one\ntwo\nthree", "fine"]


@pytest.mark.parametrize("settings", [{}, {"bad_rows": 1.0}])
def test_a_first_line_with_a_column_too_many_is_named_as_the_cause(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"all 3 rows of .*a\.csv have fewer columns than its first line") as caught:
        read(tmp_path / "a.csv", "text,label,\ngood,1\nbad,0\nfine,1\n", **settings)
    assert caught.value.problems[0].fix == "correct the first line, or the rows"
