"""Tests which combinations of versions are tested, how pytest's report is read, and what the page shows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import versions
from bench.versions import (
    BEGIN,
    END,
    LOWEST,
    PROJECT,
    Outcome,
    chosen,
    found_python,
    keep,
    outcome_of,
    read,
    table,
    with_table,
)

VERSIONS = {"python": "3.12.1", "torch": "2.11.0", "transformers": "5.17.0"}
TESTS = """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="no reason")
def test_left_out(): pass
@pytest.fixture
def broken():
    yield
    raise ValueError
def test_fails_and_breaks(broken): assert False
def test_breaks(broken): pass
"""


def test_a_report_is_counted_test_by_test(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text("import no_such_module")
    report = tmp_path / "report.xml"
    words = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", f"--junitxml={report}", tmp_path]
    subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
    found = outcome_of("gpu-image", VERSIONS, "tests/models", report.read_text())
    assert (found.passed, found.failed, found.skipped) == (1, 4, 1)
    assert found.failures == [f"test_one::test_{name}" for name in ("breaks", "fails", "fails_and_breaks")] + [
        "test_two"
    ]
    assert (found.python, found.torch, found.transformers) == ("3.12.1", "2.11.0", "5.17.0")


def outcome(name: str, selection: str = versions.ALL, passed: int = 3, **changes: Any) -> Outcome:
    found = Outcome(name, **VERSIONS, selection=selection, passed=passed, failed=1, skipped=0, date="2026-11-23")
    return replace(found, **changes)


def test_a_result_replaces_the_one_before_it_of_the_same_tests(tmp_path: Path) -> None:
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    page, path = tmp_path / "docs" / "reference" / "versions.md", tmp_path / "bench" / "results" / "versions.json"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    for each in (
        outcome("3.13-newest"), outcome("gpu-image", "tests/data"), outcome("gpu-image"),
        outcome("gpu-image", passed=1234, failures=["a"]),
    ):  # fmt: skip
        keep(each, tmp_path)
    kept = read(path)
    assert [(each.combination, each.selection, each.passed) for each in kept] == [
        ("gpu-image", versions.ALL, 1234), ("gpu-image", "tests/data", 3), ("3.13-newest", versions.ALL, 3),
    ]  # fmt: skip
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert lines[4] == "| gpu-image | 3.12.1 | 2.11.0 | 5.17.0 | all but slow | 1,234 | 1 | 0 | 2026-11-23 |"
    path.write_text(json.dumps([*json.loads(path.read_text()), {"combination": "3.9-lowest"}]))
    assert read(path) == kept, "there is no such combination any more"


def test_the_page_shows_what_was_kept() -> None:
    page = (PROJECT / "docs" / "reference" / "versions.md").read_text()
    outcomes = read(PROJECT / "bench" / "results" / "versions.json")
    assert with_table(page, outcomes) == page
    assert all(each.combination in table(outcomes) for each in outcomes)


def test_combinations_are_chosen_by_name() -> None:
    assert [each.name for each in chosen(["3.13-lowest", "gpu-image"])] == ["3.13-lowest", "gpu-image"]
    assert chosen(["3.13-lowest"])[0].options == LOWEST
    assert {each.python for each in chosen([])} == {"3.11", "3.12", "3.13"}
    with pytest.raises(SystemExit, match=r"no combination is named 3\.14-lowest: there are gpu-image"):
        chosen(["gpu-image", "3.14-lowest"])


def test_a_python_that_does_not_start_or_is_another_is_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyenv's shims are there for every version that it has, and most end with an error."""
    own, home = f"{sys.version_info[0]}.{sys.version_info[1]}", tmp_path / "versions" / "3.99.4" / "bin"
    (tmp_path / "bin").mkdir()
    home.mkdir(parents=True)
    say = "#!/bin/sh\n[ $1 = python ] && exit 2\n"
    for path, script in (
        (tmp_path / "bin" / "python3.99", "#!/bin/sh\nexit 127\n"),
        (home / "python3.99", "#!/bin/sh\necho 3.99\n"),
        (tmp_path / "bin" / "python3.98", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
        (tmp_path / "bin" / "uv", say),
    ):
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    uv = str(tmp_path / "bin" / "uv")
    assert found_python(uv, "3.99") == home / "python3.99"
    assert found_python(uv, "3.98") is None, f"it is {own}"


def test_a_missing_uv_is_named_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit, match="pip install uv"):
        versions.found_uv()


def test_a_missing_python_is_named_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "reference" / "versions.md").write_text(f"{BEGIN}\n{END}\n")
    monkeypatch.setattr(versions, "found_uv", lambda: "uv")
    monkeypatch.setattr(versions, "found_python", lambda _, version: None if version == "3.12" else Path("python"))
    monkeypatch.setattr(versions, "installed", lambda _, combination, *__: combination.name != "3.13-lowest")
    monkeypatch.setattr(versions, "tested", lambda name, *_: outcome(name, failed=0))
    assert versions.main(["--only", "gpu-image", "3.11-lowest"], tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "gpu-image: this machine has no Python 3.12", "3.11-lowest: 3 passed, 0 failed, 0 skipped",
    ]  # fmt: skip
    assert versions.main(["--only", "3.13-lowest", "3.11-newest"], tmp_path) == 1, "its packages cannot be installed"
    assert [each.combination for each in read(tmp_path / "bench" / "results" / "versions.json")] == [
        "3.11-lowest", "3.11-newest",
    ]  # fmt: skip
    for ended in (outcome("3.11-lowest", failed=1), None):
        monkeypatch.setattr(versions, "tested", lambda *_, ended=ended: ended)
        assert versions.main(["--only", "3.11-lowest"], tmp_path) == 1


def test_what_the_selection_packages_names_is_there() -> None:
    assert [path for path in versions.PACKAGES if not (versions.PROJECT / path).exists()] == []
