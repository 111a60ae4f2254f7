"""A matrix with every kind of ending, run as a user runs it, interrupted, and taken up again."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

OWN = """
import os, signal, time
import torch
from torch import nn

generator = torch.Generator().manual_seed(0)
x = torch.randn(96, 4, generator=generator)
y = (x.sum(1) > 0).long()
evaluation_data = torch.utils.data.TensorDataset(x[64:], y[64:])
loss = nn.CrossEntropyLoss()

def build_model(behaviour="good"):
    return Model(behaviour)

def train_data(behaviour="good"):
    if behaviour == "hog":
        global kept
        kept = torch.ones(2**28)  # 1 GiB
        time.sleep(30)
    return torch.utils.data.TensorDataset(x[:64], y[:64])

class Model(nn.Module):
    def __init__(self, behaviour):
        super().__init__()
        self.layer, self.behaviour = nn.Linear(4, 2), behaviour

    def forward(self, x):
        if not self.training:
            return self.layer(x)  # some samples are tried before any work
        if self.behaviour == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.behaviour == "slow":
            time.sleep(600)
        if self.behaviour == "broken":
            raise RuntimeError("the model is broken")
        if self.behaviour == "hungry":
            torch.ones(2**50)
        return self.layer(x)
"""
RUN = """
workload: {type: module, path: own.py, options: {behaviour: good}}
device: cpu
batch_size: 16
loop: {steps: 12}
optimizer: {name: sgd, lr: 0.5}
tracking: {log_every: 1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("run.yaml").write_text(RUN)
    return tmp_path


Call = Callable[..., tuple[int, str, str]]


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "comparison.csv").open(newline="") as file:
        return {row[next(iter(row))]: row for row in csv.DictReader(file)}


ENDINGS = {
    "good": "completed",
    "crash": "crashed",
    "broken": "failed",
    "hog": "out of memory",
    "slow": "timed out",
    "hungry": "out of memory",
}


@pytest.mark.long
# the last test of this file has one that is timed out
@pytest.mark.parametrize("many", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_every_ending_is_a_row_with_its_reason(many: int, drivetrain: Call) -> None:
    endings = dict(list(ENDINGS.items())[:many])
    axis = f"workload.options.behaviour={','.join(endings)}"
    limits = ["--cell-memory", "900", *(["--cell-timeout", "20"] if "slow" in endings else [])]
    code, out, err = drivetrain("compare", "run.yaml", axis, *limits)
    assert code == 1, err
    found = rows(Path("runs/run-compare"))
    assert {name: row["status"] for name, row in found.items()} == endings
    assert "SIGSEGV" in found["crash"]["reason"]
    assert "slow" not in found or found["slow"]["reason"] == "cut off after 20 s"
    assert found["broken"]["reason"] == "RuntimeError: the model is broken"
    assert "900 MiB were allowed" in found["hog"]["reason"]
    for row in found.values():
        assert row["reason"].split(":")[0] in out.replace("\n", " ")
    assert float(found["good"]["samples_per_second"]) > 0
    assert not found["crash"]["samples_per_second"]
    assert "Choose good" in out
    # nothing is run again, and the exit code still says that cells failed
    started = time.monotonic()
    code, _, err = drivetrain("compare", "run.yaml", axis, *limits)
    assert code == 1
    assert err.count("there already") == 1
    assert time.monotonic() - started < 15


@pytest.mark.long
def test_cells_refused_by_a_rule_are_rows_and_no_failure(drivetrain: Call) -> None:
    code, out, _ = drivetrain("compare", "run.yaml", "precision=fp32,tf32", "--seeds", "2")
    assert code == 0
    found = rows(Path("runs/run-compare"))
    assert found["tf32"]["status"] == "refused"
    assert "exists on cuda only" in found["tf32"]["reason"]
    assert found["fp32"]["seeds"] == "2"
    assert float(found["fp32"]["loss_spread"]) > 0
    assert "exists on cuda only" in out
    page = Path("runs/run-compare/comparison.html").read_text()
    assert "exists on cuda only" in page
    for name in ("loss", "time", "memory", "breakdown"):
        assert (Path("runs/run-compare/plots") / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (Path("runs/run-compare/plots") / f"{name}.svg").read_text()
    # the comparison, and one of its runs, side by side
    run = next(Path("runs/run-compare/cells").glob("fp32-*")) / "run"
    code, out, err = drivetrain("report", "runs/run-compare", str(run), "--output", "both")
    assert code == 0, err
    assert [name for name in rows(Path("both"))] == ["run-compare: fp32", "run-compare: tf32", "run"]


def test_a_matrix_that_cannot_start_at_all_is_refused(drivetrain: Call) -> None:
    for arguments, words in (
        (["run.yaml", "precision=tf32,fp17"], "fp17"),
        (["rum.yaml", "precision=fp32"], "no such file"),
        (["run.yaml", "precision=fp32,fp32"], "given twice"),
        (["run.yaml", "seed=1,2", "--seeds", "2"], "seed is an axis already"),
    ):
        code, _, err = drivetrain("compare", *arguments)
        assert code == 2
        assert words in err
    assert not list(Path().glob("runs/*/cells/*"))
    code, _, err = drivetrain("report", "nowhere", "own.py")
    assert code == 2
    assert err.count("holds neither") == 2


@pytest.mark.long
def test_other_axes_measure_nothing_twice_and_keep_the_earlier_page(drivetrain: Call) -> None:
    folder = Path("runs/run-compare")
    code, _, err = drivetrain("compare", "run.yaml", "batch_size=16,32")
    assert code == 0, err
    assert not (folder / "earlier").exists()
    page = (folder / "comparison.html").read_text()
    cells = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/outcome.json")}
    assert len(cells) == 2
    # an axis less: one of the two rows, which is not run again, and the page of both is kept
    code, _, err = drivetrain("compare", "run.yaml", "batch_size=32")
    assert code == 0, err
    assert err.count("there already") == 1
    assert {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/outcome.json")} == cells
    assert len(rows(folder)) == 1
    (earlier,) = (folder / "earlier").iterdir()
    assert earlier.name.startswith("batch_size-")
    assert "which has other rows, are in runs/run-compare/earlier/batch_size-" in err
    assert (earlier / "comparison.html").read_text() == page
    assert (earlier / "plots" / "loss.png").exists()
    code, _, err = drivetrain("report", str(earlier), "--output", "both")
    assert code == 0, err
    assert [row["status"] for row in rows(Path("both")).values()] == ["completed"] * 2
    code, _, err = drivetrain("report", str(earlier), "--output", str(folder))
    assert code == 2
    assert "holds a comparison, whose page this one would replace" in err
    # the same row and more: nothing else has to be kept, and two ways to write a value are one run
    code, _, err = drivetrain("compare", "run.yaml", "batch_size=32", "lr=0.5,5e-1,1")
    assert code == 0, err
    assert err.count("there already") == 2
    assert list((folder / "earlier").iterdir()) == [earlier]
    # the first comparison is there again at no cost
    (folder / "rows.json").write_text("{")
    code, _, err = drivetrain("compare", "run.yaml", "batch_size=16,32")
    assert code == 0, err
    assert err.count("there already") == 2
    assert (folder / "comparison.html").read_text() == page
    assert len(list((folder / "earlier").glob("unreadable-*/comparison.html"))) == 1


@pytest.mark.long
def test_predicting_is_compared_too(drivetrain: Call) -> None:
    code, out, err = drivetrain("compare", "run.yaml", "batch_size=8,32", "--verb", "predict")
    assert code == 0, err
    found = rows(Path("runs/run-compare"))
    assert found["8"]["accuracy"] == found["32"]["accuracy"]
    assert "samples/s" in out
    kept = json.loads(Path("runs/run-compare/comparison.json").read_text())
    assert [run["report"]["verb"] for row in kept["rows"] for run in row["runs"]] == ["predict", "predict"]
    assert kept["rows"][0]["runs"][0]["report"]["samples"] >= 160


@pytest.mark.long
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_an_interrupted_comparison_keeps_finished_cells_and_runs_half_ones_anew(
    number: signal.Signals, here: Path, drivetrain: Call
) -> None:
    axis = "workload.options.behaviour=good,slow"
    command = [sys.executable, "-m", "drivetrain", "compare", "run.yaml", axis]
    process = subprocess.Popen(command, cwd=here, stderr=subprocess.DEVNULL)
    cells = here / "runs" / "run-compare" / "cells"
    try:
        deadline = time.monotonic() + 60
        while not list(cells.glob("slow-*/pid")):  # the good one is finished, the slow one is running
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = int(next(cells.glob("slow-*/pid")).read_text())
        code, _, err = drivetrain("compare", "run.yaml", axis)
        assert code == 2
        assert "another comparison is running" in err
        os.kill(process.pid, number)
        process.wait(20)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert ended(child), "the half cell outlived the comparison"
    good = next(cells.glob("good-*/outcome.json"))
    before = good.stat().st_mtime_ns
    code, _, err = drivetrain("compare", "run.yaml", axis, "--cell-timeout", "3")
    assert code == 1
    assert "there already" in err
    assert good.stat().st_mtime_ns == before
    assert rows(here / "runs" / "run-compare")["slow"]["status"] == "timed out"


def ended(pid: int) -> bool:
    """Within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
            return True  # dead, not yet waited for
        time.sleep(0.05)
    return False
