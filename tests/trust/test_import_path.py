"""Objects named by import path."""

from __future__ import annotations

import collections
import os.path
import sys
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.trust.import_path import import_object


@pytest.mark.parametrize("path", ["collections:OrderedDict", "collections.OrderedDict"])
def test_an_object_is_found_by_its_path(path: str) -> None:
    assert import_object(path, "optimizer.name") is collections.OrderedDict


def test_a_function_of_a_submodule_is_found() -> None:
    assert import_object("os.path:join", "x") is os.path.join


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lies_here_alone.py").write_text("def made():\n    return 3\n")
    (tmp_path / "json.py").write_text("def made():\n    return 4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert import_object("lies_here_alone:made", "schedule.name")() == 3
    with pytest.raises(UserError, match="json has no made"):  # what is installed comes first
        import_object("json:made", "schedule.name")


def test_a_module_that_fails_when_imported_is_reported_with_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="failing_module fails when it is imported: ZeroDivisionError"):
        import_object("failing_module:Thing", "optimizer.name")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere.at_all:Thing", "No module named 'nowhere'"),
        ("collections:Nothing", "Nothing"),
        ("collections.Nothing", "Nothing"),
        ("a..b:c", "cannot be imported"),
        ("no", "is no import path"),
        (":x", "is no import path"),
    ],
)
def test_what_cannot_be_imported_is_reported_with_its_field(path: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        import_object(path, "optimizer.name")
    assert caught.value.problems[0].field == "optimizer.name"
    assert why in caught.value.problems[0].why
