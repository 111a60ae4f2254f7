"""Tests what a comparison's folder keeps of an earlier one that had other rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drivetrain.compare.kept import EARLIER, ROWS, remember, remembered
from tests.compare.made import comparison, report


def test_an_earlier_comparison_is_read_where_it_was_put(tmp_path: Path) -> None:
    first = comparison(tmp_path / "cells", fp32=[report()], bf16=[report(200)])
    (tmp_path / "comparison.md").write_text("earlier")
    assert remember(first, tmp_path) is None
    aside = remember(replace(first, rows=first.rows[:1]), tmp_path)
    assert aside is not None
    assert aside.parent == tmp_path / EARLIER
    assert (aside / "comparison.md").read_text() == "earlier"
    folders = [result.folder.resolve() for row in remembered(aside) for result in row.results]
    assert folders == [result.folder.resolve() for row in first.rows for result in row.results]
    assert [row.label for row in remembered(tmp_path)] == ["fp32"]


def test_a_file_that_cannot_be_read_is_put_aside_as_it_is(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_text("{")
    aside = remember(comparison(tmp_path / "cells", fp32=[report()]), tmp_path)
    assert aside is not None
    assert aside.name.startswith("unreadable-")
    assert (aside / ROWS).read_text() == "{"
