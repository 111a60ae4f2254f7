"""The wheel: what is in it, and that it works from an empty folder without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the build backend itself, which needs no network."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    script = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        metadata = HeaderParser().parsestr(
            opened.read(next(n for n in opened.namelist() if n.endswith("METADATA"))).decode()
        )
        entry_points = opened.read(next(n for n in opened.namelist() if n.endswith("entry_points.txt"))).decode()
    package = ROOT / "src"
    there = {
        path.relative_to(package).as_posix()
        for path in (package / "drivetrain").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == there
    assert {"drivetrain/py.typed", "drivetrain/recipes/digits.yaml", "drivetrain/recipes/linear.py"} <= names
    assert metadata["Name"] == "drivetrain"
    assert metadata["Requires-Python"] == ">=3.11"
    assert any(line.startswith("torch>=") for line in metadata.get_all("Requires-Dist", []))
    assert "drivetrain = drivetrain.cli:main" in entry_points


@pytest.mark.slow
def test_the_wheel_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """Unpacked as pip does, its dependencies being those that are installed here."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=empty, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import drivetrain; print(drivetrain.__file__)").startswith(str(site))
    assert "digits" in run("-m", "drivetrain", "recipes")
    run("-m", "drivetrain", "init")
    run("-m", "drivetrain", "train", "run.yaml", "loop.epochs=1", "limit_train=64", "limit_evaluation=20", "--quiet")
    run("-m", "drivetrain", "init", "linear", "-o", "linear.yaml")
    script = "import drivetrain; print(drivetrain.train('linear.yaml', epochs=1, quiet=True).status)"
    assert run("-c", script).strip() == "completed"
    assert (empty / "runs" / "run" / "report.json").is_file()
