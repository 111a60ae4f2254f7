"""Tests what a result depends on beside the run file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from drivetrain.runtime import environment
from drivetrain.runtime.hardware import detect


def git(*arguments: str) -> None:
    identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


def test_versions_hardware_and_platform_are_reported_as_json() -> None:
    words = json.loads(json.dumps(environment.describe(detect("cpu"))))
    assert words["versions"]["torch"] == torch.__version__
    assert words["device"] == "cpu"
    assert words["cpu_cores"] > 0


def test_the_commit_of_the_current_folder_and_whether_it_has_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.git_commit() is None
    git("init")
    (tmp_path / "model.py").write_text("a")
    git("add", ".")
    git("commit", "-m", "x")
    found = environment.git_commit()
    assert found is not None
    assert len(found["commit"]) == 40
    assert found["changed"] is False
    (tmp_path / "model.py").write_text("b")
    assert environment.git_commit() == {**found, "changed": True}


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment.git_commit() is None
