"""The pages "Add an engine" and "Add a verb", followed to the letter in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent
ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    return re.findall(r"```[a-z]*\n(.*?)```", (ROOT / "docs/how-to" / page).read_text(), re.DOTALL)


def written(page: str, folder: Path) -> list[str]:
    """Writes each file of a page, whose block begins with the file's name, into a copy of the package; returns their
    names."""
    shutil.copytree(PACKAGE, folder / "src/drivetrain", ignore=shutil.ignore_patterns("__pycache__"))
    names = []
    for block in blocks(page):
        name = re.match(r"# (src/drivetrain/\S+\.py)\n", block)
        if name is not None:
            assert not (folder / name[1]).exists(), "a file of its own"
            (folder / name[1]).write_text(block)
            names.append(name[1])
    return names


def answer(folder: Path, *words: str) -> str:
    """What a command prints with the copied package."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_files_make_an_engine_that_run_files_may_name(tmp_path: Path) -> None:
    assert len(written("add-an-engine.md", tmp_path)) == 2
    printed = answer(tmp_path, "-m", "drivetrain", "fields", "engine.in_fp16")
    assert "Exchange gradients in fp16" in printed
    assert '"allreduce"' in answer(tmp_path, "-m", "drivetrain", "schema")


@pytest.mark.slow  # three starts of processes
def test_the_engine_of_the_page_keeps_its_promises(tmp_path: Path) -> None:
    written("add-an-engine.md", tmp_path)
    printed = answer(
        tmp_path, "-m", "drivetrain", "prove", "recipes/linear.yaml", "engine=allreduce", "processes=2", "--steps=4"
    )
    assert printed.count("PASS") == 5
    assert "FAIL" not in printed


@pytest.mark.slow  # it imports PyTorch
def test_a_file_and_a_line_make_a_verb(tmp_path: Path) -> None:
    assert written("add-a-verb.md", tmp_path) == ["src/drivetrain/cli/size.py"]
    [line] = [block for block in blocks("add-a-verb.md") if block.startswith('"size":')]
    table = tmp_path / "src/drivetrain/cli/app.py"
    first = '    "version": ('
    assert table.read_text().count(first) == 1
    table.write_text(table.read_text().replace(first, f"    {line}{first}"))
    printed = answer(tmp_path, "-m", "drivetrain", "size", "recipes/linear.yaml")
    assert re.search(r"^all +11$", printed, re.MULTILINE), printed
