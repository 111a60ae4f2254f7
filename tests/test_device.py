"""Tests how the tests themselves come to run on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device import VARIABLE, missing

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = """
import torch

def test_takes_the_device(device): assert device == "{device}"

def test_makes_tensors_there(on_device): assert torch.zeros(1).device.type == "{device}"

def test_takes_none(): raise AssertionError("left out by --only-device")
"""


def started(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest over a file beside this project's conftest."""
    (tmp_path / "test_sample.py").write_text(SAMPLE.format(device="cpu"))
    words = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*words, "-c", str(ROOT / "pyproject.toml"), *options, str(tmp_path / "test_sample.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_tests_that_take_the_device_run_alone_where_they_are_asked_for(tmp_path: Path) -> None:
    done = started(tmp_path, "--only-device", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 1 deselected" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_any_test_runs(tmp_path: Path) -> None:
    done = started(tmp_path, "--device", "cuda")
    assert done.returncode == 4
    assert "PyTorch sees no GPU here" in done.stderr
    assert missing("tpu") == "tpu is no device of the tests: cpu or cuda"
    assert missing("cpu") is None
