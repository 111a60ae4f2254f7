"""Objects named by import path."""

from __future__ import annotations

import collections
import os.path
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.imports import import_object


@pytest.mark.parametrize("path", ["collections:OrderedDict", "collections.OrderedDict"])
def test_an_object_is_found_by_its_path(path: str) -> None:
    assert import_object(path, "optimizer.name") is collections.OrderedDict


def test_a_function_of_a_submodule_is_found() -> None:
    assert import_object("os.path:join", "x") is os.path.join


def test_a_module_that_fails_when_imported_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="failing_module fails when it is imported: ZeroDivisionError"):
        import_object("failing_module:Thing", "optimizer.name")


@pytest.mark.parametrize(
    "path", ["nowhere.at_all:Thing", "collections:Nothing", "collections.Nothing", "no", "a..b:c", ":x"]
)
def test_what_cannot_be_imported_is_told_with_its_field(path: str) -> None:
    with pytest.raises(UserError) as caught:
        import_object(path, "optimizer.name")
    assert caught.value.problems[0].field == "optimizer.name"
