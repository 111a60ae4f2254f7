"""Tests what the plain scripts do by hand, and the run files beside them that ask for the same."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAIN = ROOT / "examples" / "plain"
STEPS = 4
FEW = [f"loop.steps={STEPS}", f"evaluation.every_steps={STEPS}", "--quiet"]
SCRIPTS = {  # name: ranks, the report's engine
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "fsdp": (2, "fsdp"),
    "zero2": (2, "zero2"),
    "accelerate_ddp": (2, "accelerate-ddp"),
    "mesh_tp": (2, "mesh-tp2"),
    "mesh_pp": (2, "mesh-pp2"),
    "mesh_cp": (2, "mesh-cp2"),
    "mesh_dp": (2, "mesh-dp2"),
    "mesh_shard": (2, "mesh-dp2-shard"),
}
SLOW = {"ddp", "fsdp", "zero2", "accelerate_ddp", "mesh_tp", "mesh_pp", "mesh_cp", "mesh_dp", "mesh_shard"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(PLAIN, tmp_path / "examples" / "plain")
    shutil.copy(ROOT / "README.md", tmp_path)  # what the language models read
    return tmp_path


def done(folder: Path, *arguments: str) -> str:
    """Returns what a Python of its own prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_script_has_its_run_file() -> None:
    scripts = {path.stem for path in PLAIN.glob("*.py")} - {"net", "mesh_common"}
    assert scripts == {path.stem for path in PLAIN.glob("*.yaml")} == set(SCRIPTS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SCRIPTS]
)
def test_a_plain_script_and_its_run_file_both_train(checkout: Path, name: str) -> None:
    ranks, engine = SCRIPTS[name]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = json.loads(done(checkout, *torchrun, f"examples/plain/{name}.py", str(STEPS)).strip().splitlines()[-1])
    assert words["samples_per_second"] > 0
    assert math.isfinite(words["loss"])
    done(checkout, "-m", "drivetrain", "train", f"examples/plain/{name}.yaml", *FEW)
    report = json.loads((checkout / "runs" / name / "report.json").read_text())
    assert (report["status"], report["steps"], report["engine"]) == ("completed", STEPS, engine)
    assert report["engaged"]["world_size"] == ranks
    assert math.isfinite(report["metrics"]["loss"])
