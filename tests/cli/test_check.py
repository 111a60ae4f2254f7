"""The dry run refuses what `train` refuses, in the same words, and leaves nothing."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.test_cli import REFUSED, here

Command = Callable[..., tuple[int, str, str]]

Usage = namedtuple("Usage", ["total", "used", "free"])

__all__ = ["here"]  # a fixture


def files() -> set[Path]:
    return {path for path in Path().rglob("*") if "cache" not in path.parts}


@pytest.mark.parametrize("case", [case for case in REFUSED if case != "corrupt image"])
def test_what_train_refuses_check_refuses_in_the_same_words(case: str, drivetrain: Command) -> None:
    change, arguments, words = REFUSED[case]
    change()
    before = files()
    code, out, err = drivetrain("check", *arguments)
    assert code == 2, out
    for each in words:
        assert each in err, err
    assert "Traceback" not in out + err
    assert files() == before


def test_a_run_that_can_start_is_shown_and_nothing_is_left(drivetrain: Command) -> None:
    before = files()
    code, out, err = drivetrain("check", "digits.yaml", "precision=bf16-mixed")
    assert code == 0, err
    for words in ("engine=single, precision=bf16-mixed", "64 samples", "4 steps of 16 samples", "runs/digits is free"):
        assert words in out
    assert files() == before
    assert drivetrain("train", "digits.yaml", "precision=bf16-mixed", "--quiet")[0] == 0


def test_the_numbers_of_the_object_are_those_of_the_training(drivetrain: Command) -> None:
    code, out, _ = drivetrain("check", "digits.yaml", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["ready"]
    assert found["problems"] == []
    assert drivetrain("train", "digits.yaml", "--quiet")[0] == 0
    report = json.loads(Path("runs/digits/report.json").read_text())
    assert found["model"]["parameters"] == report["engaged"]["global_parameters"]
    assert found["steps"] == report["steps"]
    weights = [file for file in Path(report["checkpoint"]).glob("*.safetensors") if file.name.startswith("model")]
    held = sum(tensor.nbytes for file in weights for tensor in load_file(file).values())
    assert found["checkpoints"]["bytes"] == 3 * held, "weights and AdamW's two moments"


def test_lines_show_each_part_as_soon_as_it_is_known(drivetrain: Command) -> None:
    code, out, _ = drivetrain("check", "digits.yaml", "--json-lines")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [each.pop("next") for each in lines] == ["data", "model", "plan", None]
    added = [set(after) - set(before) for before, after in itertools.pairwise(lines)]
    assert added == [{"data", "steps", "steps_per_epoch"}, {"model", "checkpoints", "folder"}, {"plan"}]
    assert lines[-1].keys() == json.loads(drivetrain("check", "digits.yaml", "--json")[1]).keys()
    code, out, _ = drivetrain("check", "digits.yaml", "precision=tf32", "--json-lines")
    assert code == 2
    assert not json.loads(out.splitlines()[-1])["ready"]


def test_problems_of_file_rules_data_and_optimizer_come_together(drivetrain: Command) -> None:
    wrong = ("sed=3", "precision=tf32", "device=cpu", "batch_size=65", "trackers=[tensorbord]", "output=digits.yaml/a")
    code, out, _ = drivetrain("check", "digits.yaml", *wrong, "optimizer.options={lookahead: 3}", "--json")
    assert code == 2
    found = json.loads(out)
    fields = {each["field"] for each in found["problems"]}
    expected = {"sed", "precision", "batch_size", "tracking.trackers", "output", "optimizer.options.lookahead"}
    assert fields == expected
    assert not found["ready"]
    assert all(each["why"] and each["fix"] for each in found["problems"])


def test_a_run_file_that_cannot_be_read_is_an_object_too(drivetrain: Command) -> None:
    code, out, _ = drivetrain("check", "digit.yaml", "--json")
    assert code == 2
    assert "did you mean digits.yaml" in json.loads(out)["problems"][0]["fix"]


def test_a_file_that_is_missing_is_a_problem_in_json_too(drivetrain: Command) -> None:
    code, output, _ = drivetrain("check", "digits.yaml", "data.source=folder", "data.train=nothing", "--json")
    [found] = [each for each in json.loads(output)["problems"] if each["field"] == "workload.data.train"]
    assert (code, set(found)) == (2, {"field", "why", "fix"})


def test_the_folder_of_a_finished_run_is_free_for_resume_and_overwrite_only(drivetrain: Command) -> None:
    assert drivetrain("train", "digits.yaml", "--quiet")[0] == 0
    before = files()
    code, _, err = drivetrain("check", "digits.yaml")
    assert code == 2
    assert "already holds a run" in err
    assert drivetrain("check", "digits.yaml", "--overwrite")[0] == 0
    assert drivetrain("check", "digits.yaml", "--resume", "loop.steps=8")[0] == 0
    assert files() == before


def test_a_finished_run_hides_nothing_that_its_engine_would_refuse(drivetrain: Command) -> None:
    Path("own.py").write_text(
        "import torch\nmodel, loss = torch.nn.Linear(2, 1), torch.nn.MSELoss()\n"
        "train_data = [(torch.ones(2), torch.ones(1))] * 8\n"
    )
    Path("own.yaml").write_text("workload: {type: module, path: own.py}\nbatch_size: 4\nloop: {steps: 1}\n")
    assert drivetrain("train", "own.yaml", "--quiet")[0] == 0
    code, _, err = drivetrain("check", "own.yaml", "engine=mesh-tp2", "processes=2")
    assert code == 2
    assert "already holds a run" in err
    assert "engine.tp: Linear has no plan for tensor parallelism" in err
    assert "2 problems" in err


def test_a_folder_that_a_run_works_in_is_named_with_its_process(drivetrain: Command) -> None:
    holder = "import sys, pathlib; from drivetrain.runtime.lock import held\nwith held(pathlib.Path('runs/digits')):\n"
    holder += "    print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", holder], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        code, _, err = drivetrain("check", "digits.yaml")
        process.communicate("")
    assert code == 2
    assert f"process {process.pid}" in err


def test_a_disk_without_room_for_a_checkpoint_is_refused(drivetrain: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1000))
    code, _, err = drivetrain("check", "digits.yaml")
    assert code == 2
    assert "a checkpoint takes at least" in err


def test_code_of_the_users_that_cannot_read_its_samples_is_named(drivetrain: Command) -> None:
    Path("own.py").write_text(
        "import torch\n"
        "class Data:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): return {}['lost']\n"
        "def model(): return torch.nn.Linear(2, 1)\n"
        "def train_data(): return Data()\n"
        "loss = torch.nn.MSELoss()\n"
    )
    Path("own.yaml").write_text("workload: {type: module, path: own.py}\nbatch_size: 4\nloop: {steps: 1}\n")
    code, _, err = drivetrain("check", "own.yaml")
    assert code == 2
    assert "lost" in err
    assert "Traceback" not in err
