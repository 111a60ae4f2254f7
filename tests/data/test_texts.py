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
    data = TextData(**({"train": str(path), "text_column": "text", "label_column": "label"} | settings))
    return read_texts(data, str(path), "workload.data.train", labelled)


def test_rows_without_text_are_dropped_counted_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    found = read(path, 'text,label\ngood,1\n,0\n"  ",0\nbad,0\n', bad_rows=0.5)
    assert found.first == ["good", "bad"]
    assert found.labels.tolist() == ["1", "0"]
    assert found.rows.tolist() == [1, 4]
    assert [bad.where for bad in found.bad] == [f"row 2 of {path}", f"row 3 of {path}"]


@pytest.mark.parametrize(("given", "most"), [("drop", ", more than 5 %"), ("error", ""), (0.4, ", more than 40 %")])
def test_more_rows_without_text_than_may_be_left_out_are_refused(tmp_path: Path, given: Any, most: str) -> None:
    text, path = 'text,label\ngood,1\n,0\n"  ",0\nbad,0\n', tmp_path / "a.csv"
    with pytest.raises(UserError) as caught:
        read(path, text, bad_rows=given)
    why = f"2 of the 4 rows of {path} cannot be used{most}: 2 because it has no text (first row 2 of {path})"
    assert why in str(caught.value)
    assert "give workload.data.bad_rows=0.5" in str(caught.value)
    assert read(path, text, labelled=False, bad_rows=given).first == ["good", "bad"]


def test_labels_that_a_gap_made_floats_are_whole_numbers_again(tmp_path: Path) -> None:
    assert read(tmp_path / "a.csv", "text,label\n,\ngood,1\nbad,0\n", bad_rows=0.5).labels.tolist() == ["1", "0"]


def test_pairs_keep_both_texts(tmp_path: Path) -> None:
    found = read(tmp_path / "a.csv", "text,other,label\na,b,x\nc,,y\n", text_pair_column="other")
    assert (found.first, found.second) == (["a", "c"], ["b", ""])


def test_a_text_without_label_is_refused_unless_it_is_to_be_predicted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 rows of .* have no label: 2"):
        read(tmp_path / "a.csv", "text,label\ngood,1\nbad,\n")
    assert len(read(tmp_path / "b.csv", "text\ngood\n", labelled=False).first) == 1


def test_a_file_without_any_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no row of .* has a text"):
        read(tmp_path / "a.csv", "text,label\n,1\n,0\n")


def test_classes_are_sorted_as_numbers_where_they_are(tmp_path: Path) -> None:
    assert class_names(["10", "9", "2", "9"], "f") == ["2", "9", "10"]
    assert class_names(["b", "a", "10"], "f") == ["10", "a", "b"]
    assert encode(np.array(["b", "a"]), ["a", "b"], str(tmp_path), "f").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("labels", "said"), [(["1", "1"], "are of one class"), ([str(i) for i in range(3000)], "hardly classes")]
)
def test_labels_that_are_no_classes_are_refused(labels: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        class_names(labels, "workload.data.label_column")


def test_a_label_that_training_does_not_know_is_named() -> None:
    with pytest.raises(UserError, match="lack: 'c'"):
        encode(np.array(["a", "c"]), ["a", "b"], "test.csv", "workload.data.evaluation")
