"""Objects named by import path."""

from __future__ import annotations

import collections
import os.path
import sys
from pathlib import Path
from typing import Any

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


def fix_of(path: str, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        import_object(path, "optimizer.name", **given)
    return caught.value.problems[0].fix


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder that holds a module and a package."""
    for name in ("my_rewards.py", "my_parts/__init__.py", "my_parts/scores.py", "loose/alone.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def closeness(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return tmp_path


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("my_reward:closeness", "my_rewards"),
        ("My_Rewards.closeness", "my_rewards"),
        ("my_part.scores:closeness", "my_parts"),
        ("my_parts.score:closeness", "my_parts.scores"),
    ],
)
def test_a_misspelt_module_is_reported_with_the_one_that_is_near(path: str, meant: str) -> None:
    assert fix_of(path).startswith(f"did you mean {meant}? Else install the package")


def test_for_a_module_that_is_there_and_imports_a_missing_one_none_is_suggested(mine: Path) -> None:
    (mine / "needy.py").write_text("import my_reward")
    assert fix_of("needy:closeness").startswith("install the package")
    assert fix_of("nothing_like_it:closeness").startswith("install the package")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("my_rewards.py:closeness", "write my_rewards:closeness"),
        ("./my_rewards.py:closeness", "write my_rewards:closeness"),
        ("./my_rewards:closeness", "write my_rewards:closeness"),
        ("my_parts/scores.py:closeness", "write my_parts.scores:closeness"),
        ("loose/alone.py:closeness", "write alone:closeness, and add loose to PYTHONPATH"),
        ("/elsewhere/far.py:closeness", "write far:closeness, and add /elsewhere to PYTHONPATH"),
        ("my_rewards.py", "name a function: my_rewards:FUNCTION"),
        ("./my_rewards.py", "name a function: my_rewards:FUNCTION"),
    ],
)
def test_the_path_of_a_file_is_refused_with_the_import_path_that_is_meant(path: str, fix: str) -> None:
    assert fix_of(path) == fix


def test_where_a_class_is_named_the_path_of_a_file_lacks_a_class(mine: Path) -> None:
    assert fix_of(str(mine / "my_rewards.py"), kind="class") == "name a class: my_rewards:CLASS"
