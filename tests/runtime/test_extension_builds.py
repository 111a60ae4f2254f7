"""Tests where torch builds native extensions, and what interrupted builds leave there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.doctor.findings import left_builds
from drivetrain.runtime import extension_builds


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a build that began an hour ago."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = extension_builds.build_folder("some_op")
    folder.mkdir(exist_ok=True)
    (folder / "build.ninja").touch()
    os.utime(folder / "build.ninja", (0, 0))
    return folder


def test_torch_builds_where_we_look(folder: Path, tmp_path: Path) -> None:
    assert folder == tmp_path / "some_op"
    assert list(extension_builds.folders()) == [folder]


def test_doctor_names_the_two_quoted_failures_and_their_cure(folder: Path) -> None:
    state, why = left_builds()["build of some_op"]
    assert (state, "some_op.so: cannot open shared object file" in why, f"rm -r {folder}" in why) == ("no", True, True)
    (folder / "lock").touch()
    os.utime(folder / "lock", (0, 0))
    assert "left a lock" in left_builds()["build of some_op"][1]
    (folder / "lock").unlink()
    (folder / "some_op.so").touch()
    assert not left_builds()


def test_a_build_that_goes_on_is_no_left_one(folder: Path) -> None:
    (folder / "lock").touch()
    os.utime(folder / "lock", (0, 0))
    compiler = subprocess.Popen([sys.executable, "-c", "input()"], cwd=folder, stdin=subprocess.PIPE)
    try:
        assert extension_builds.is_building(folder, patience=0.0)
        assert not left_builds()
    finally:
        compiler.kill()
        compiler.communicate()
    assert not extension_builds.is_building(folder, patience=0.0)
    assert extension_builds.is_building(folder, patience=1e12), "a shared disk: it may be another machine's"
