"""Python that a run's folder names runs where it lies in the current folder, or with --trust; a run file's always."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.trust.named_code import named_code
from tests.trust.stranger import marking

Command = Callable[..., tuple[int, str, str]]
MODULE = """
{mark}
import torch
from torch import nn
from torch.utils.data import TensorDataset

model, loss = nn.Linear(3, 1), nn.MSELoss()
train_data = evaluation_data = TensorDataset(torch.rand(8, 3), torch.rand(8, 1))
"""
SOURCE = Path(drivetrain.__file__).parent


def run_of(**changes: Any) -> RunConfig:
    raw = {"workload": {"type": "module", "path": "net.py"}, "batch_size": 4, "loop": {"steps": 1}} | changes
    run, problems = validate(raw, [])
    assert run is not None, problems
    return run


@pytest.fixture
def folder(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's run, in the current folder, with its Python elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "net.py").write_text(MODULE.format(mark=marking(marker)))
    (tmp_path / "here" / "runs" / "theirs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    folder = Path("runs") / "theirs"
    (folder / "environment.json").write_text("{}")
    return folder


def name(folder: Path, path: Path, more: str = "") -> None:
    (folder / "run.yaml").write_text(
        f"workload: {{type: module, path: {path}}}\nbatch_size: 4\nloop: {{steps: 2}}\noutput: {folder}-out\n{more}"
    )


def verbs(folder: Path) -> dict[str, list[str]]:
    run_file = str(folder / "run.yaml")
    return {
        "replay": ["replay", str(folder), "--step", "1"],
        "train": ["train", run_file, "--quiet"],
        "evaluate": ["evaluate", run_file],
        "predict": ["predict", run_file],
        "data": ["data", run_file],
        "prove": ["prove", run_file, "--steps", "2"],
        "compare": ["compare", run_file, "seed=1,2"],
        "convert": ["checkpoint", "convert", "theirs", "--run", run_file],
    }


@pytest.mark.parametrize("verb", verbs(Path()))
def test_no_verb_runs_what_a_runs_folder_names_outside_the_current_folder(
    drivetrain: Command, folder: Path, tmp_path: Path, marker: Path, verb: str
) -> None:
    name(folder, tmp_path / "elsewhere" / "net.py")
    (folder.parent / "theirs-out" / "checkpoints" / "step-00000001").mkdir(parents=True)
    code, _, err = drivetrain(*verbs(folder)[verb])
    assert code == 2
    assert "workload.path" in err
    assert "lies outside the current folder" in err
    assert "--trust" in err
    assert not marker.exists()


def test_what_came_with_the_folder_is_refused_though_it_lies_in_the_current_one(
    drivetrain: Command, folder: Path, marker: Path
) -> None:
    name(folder, folder / "net.py")
    (folder / "net.py").write_text(MODULE.format(mark=marking(marker)))
    code, _, err = drivetrain("replay", str(folder), "--step", "1")
    assert code == 2
    assert "which came with the folder" in err
    assert not marker.exists()


def test_with_trust_it_runs(drivetrain: Command, folder: Path, tmp_path: Path, marker: Path) -> None:
    name(folder, tmp_path / "elsewhere" / "net.py")
    code, out, err = drivetrain("replay", str(folder), "--step", "1", "--trust")
    assert code == 0, err
    assert "every number is finite" in out
    assert marker.exists()


def test_code_of_the_current_folder_and_of_a_run_file_needs_no_word(
    drivetrain: Command, folder: Path, tmp_path: Path, marker: Path
) -> None:
    Path("net.py").write_text(MODULE.format(mark=marking(marker)))
    name(folder, Path("net.py"))
    code, _, err = drivetrain("replay", str(folder), "--step", "1")
    assert code == 0, err
    name(folder, tmp_path / "elsewhere" / "net.py")
    own = (folder / "run.yaml").rename("mine.yaml")
    assert drivetrain("train", str(own), "--quiet")[0] == 0


def test_all_that_a_run_names_is_reported_at_once(drivetrain: Command, folder: Path, tmp_path: Path) -> None:
    more = "optimizer: {name: 'antigravity:Optimizer'}\nschedule: {name: 'this:shape'}\n"
    more += "tracking: {trackers: [progress, 'this:Tracker']}\n"
    name(folder, tmp_path / "elsewhere" / "net.py", more)
    code, _, err = drivetrain("train", str(folder / "run.yaml"))
    assert code == 2
    assert "4 problems" in err
    names = ("antigravity:Optimizer", "this:shape", "this:Tracker", "elsewhere/net.py")
    assert all(each in err.replace(" ", "") for each in names), "a long path is cut at the width of the terminal"
    code, _, err = drivetrain("replay", str(folder), "--step", "1")
    assert "3 problems" in err, "a replay tells no tracker"


def test_a_permission_in_a_runs_folder_is_no_permission(drivetrain: Command, folder: Path, tmp_path: Path) -> None:
    model = {"path": str(tmp_path / "elsewhere"), "trust_remote_code": True}
    work = {"type": "language_model", "model": model, "data": {"train": "rows.txt"}}
    (folder / "run.yaml").write_text(f"workload: {work}\nbatch_size: 4\nloop: {{steps: 2}}\n".replace("True", "true"))
    Path("rows.txt").write_text("a b c")
    for verb in ("replay", "evaluate"):
        code, _, err = drivetrain(*verbs(folder)[verb])
        assert code == 2
        assert "workload.model.trust_remote_code" in err
        assert "--trust" in err


def test_names_of_the_packages_own_tables_are_no_code() -> None:
    run = run_of(optimizer={"name": "adamw8bit"}, tracking={"trackers": ["progress", "tensorboard"]})
    assert [code.field for code in named_code(run)] == ["workload.path"]


def test_whatever_imports_by_name_is_among_what_is_looked_at() -> None:
    """A new field that names Python has to be added to trust/named_code.py too."""
    calls: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                calls.setdefault(called, set()).add(file.relative_to(SOURCE).as_posix())
    known = {"generation/text_metrics.py", "optim/optimizers.py", "optim/schedules.py", "tracking/build.py"}
    known.add("rewards/worker.py")
    assert calls["import_object"] == known
    assert calls["spec_from_file_location"] == {"workloads/user_file.py"}
    own = {"exec", "eval", "run_path", "run_module", "__import__"} & calls.keys()
    assert own <= {"eval"}, "model.eval() alone"
    assert not re.search(r"(?<![\w.])eval\(", "".join(file.read_text() for file in SOURCE.rglob("*.py")))
