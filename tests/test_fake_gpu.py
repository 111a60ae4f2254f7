"""Steps and evaluations on a GPU that is played (fake_gpu.py): no tensor lies elsewhere, no step asks for a number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_gpu import KINDS, PLANTED, PRECISIONS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all cases, from one process of their own: the device is registered for good."""
    command = [sys.executable, "-m", "tests.fake_gpu", str(tmp_path_factory.mktemp("fake-gpu"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_stays_on_the_device(kind: str, precision: str, outcomes: dict[str, str]) -> None:
    assert outcomes[f"{kind}, {precision}"] == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_stays_on_the_device(kind: str, outcomes: dict[str, str]) -> None:
    assert outcomes[f"{kind}, evaluated"] == ""


@pytest.mark.parametrize(
    ("plant", "words"),
    [("wrong device", "at least two devices, fakegpu:0 and cpu"), ("a number asked for", "_local_scalar_dense")],
)
def test_what_was_planted_is_found(plant: str, words: str, outcomes: dict[str, str]) -> None:
    assert plant in PLANTED
    assert words in outcomes[plant]
