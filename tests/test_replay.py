"""A run that meets a NaN: what it says, what it keeps, and that a step can be done again to the bit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint.saving import save
from drivetrain.cli import main
from drivetrain.config.load import validate
from drivetrain.data.order import GlobalOrder
from drivetrain.errors import RunError
from drivetrain.replay import on_one_process, replay
from drivetrain.tracking.jsonl import read_events
from drivetrain.training import run_checkpoints, step_guard
from tests.test_reward_runs import run_file

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
y = x @ torch.arange(10.0).unsqueeze(1) + 3
x[{bad}, 4] = float("nan")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(10, 16), nn.Dropout(0.2), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.first(x))))


model = Net()
loss = nn.MSELoss()
train_data = TensorDataset(x, y)
"""
RUN = """
workload: {{type: module, path: {module}}}
batch_size: 20
micro_batch_size: 8
loop: {{steps: 10}}
optimizer: {{name: adamw, lr: 0.01}}
schedule: {{name: cosine}}
checkpoints: {{every_steps: 3}}
tracking: {{log_every: 1}}
"""
STEP = 9
BAD = int(GlobalOrder(200, 20, seed=0).batch(STEP - 1)[1][5])
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that met its bad sample."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "net.py").write_text(MODULE.format(bad=BAD))
    (folder / "run.yaml").write_text(RUN.format(module=folder / "net.py"))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder / "run.yaml"), f"output={folder / 'out'}", "--quiet"])
    assert ended.value.code == 1
    return folder / "out"


@pytest.fixture
def run(failed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(failed, tmp_path / "out"))


def hush(_: str) -> None:
    """Returns what is said on the way."""


def curve(run: Path) -> Iterator[tuple[int, float, float]]:
    for event in read_events(run / "events.jsonl"):
        if event["event"] == "step":
            yield event["step"], event["loss"], event["grad_norm"]


def test_the_error_names_step_samples_module_and_the_way_to_look(failed: Path) -> None:
    events = list(read_events(failed / "events.jsonl"))
    [trouble] = [event for event in events if event["event"] == "trouble"]
    assert trouble["step"] == STEP
    assert (trouble["trouble"], trouble["action"]) == ("not_finite", "stopped")
    assert math.isnan(trouble["loss"])
    assert BAD in trouble["samples"]
    message = events[-1]["message"]
    assert events[-1]["status"] == "failed"
    for part in (f"step {STEP}: the loss is nan", "is of first (Linear)", f"replay {failed} --step {STEP}"):
        assert part in message
    assert [step for step, _, _ in curve(failed)] == list(range(1, STEP))


def test_a_state_that_could_not_be_kept_is_reported_though_checkpoints_are_written_in_the_background(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(root: Path, *given: Any) -> Path:
        if "trouble" in root.parts:
            raise RunError("no space left")
        return save(root, *given)

    monkeypatch.setattr(run_checkpoints, "save", full)
    (tmp_path / "net.py").write_text(MODULE.format(bad=BAD))
    (tmp_path / "run.yaml").write_text(RUN.format(module=tmp_path / "net.py"))
    output = f"output={tmp_path / 'out'}"
    code, _, err = drivetrain("train", str(tmp_path / "run.yaml"), output, "checkpoints.asynchronous=true")
    assert code == 1
    assert "(The state before it could not be kept: no space left" in err


def test_the_batch_is_kept_as_it_was_cut(failed: Path) -> None:
    noted = json.loads((failed / "trouble" / f"step-{STEP:08d}" / "trouble.json").read_text())
    [pieces] = noted["micro_batches"]
    assert [index for piece in pieces for index in piece] == noted["samples"]
    assert [len(piece) for piece in pieces] == [7, 7, 6]
    assert noted["update_made"] is False


@pytest.mark.parametrize(("start", "gone"), [(f"step-{STEP - 1:08d}", []), ("step-00000006", ["trouble"])])
def test_a_bad_step_is_done_again_to_the_bit(run: Path, start: str, gone: list[str]) -> None:
    """From the state that trouble kept, and without it from a checkpoint: dropout's masks are the same."""
    for name in gone:
        shutil.rmtree(run / name)
    found = replay(run, STEP, hush, trust=True)
    assert Path(found.start).name == start
    assert found.repeated is (None if gone else True)
    assert math.isnan(found.loss)
    assert found.inspection.output is not None
    assert found.inspection.output.where == "first"
    assert found.guilty == [BAD]
    assert "1 of 10 not finite" in found.shown[BAD]
    bad = next(number for number, piece in enumerate(found.micro_batches) if BAD in piece)
    assert found.inspection.micro_batch == bad
    good = [loss for number, loss in enumerate(found.inspection.losses) if number != bad]
    assert all(map(math.isfinite, good))


@pytest.mark.parametrize("step", [2, 5, 6, 8])
def test_a_good_step_is_done_again_to_the_bit(run: Path, step: int) -> None:
    """From the beginning, a checkpoint some steps before, one just before, and where the step itself was saved."""
    shutil.rmtree(run / "trouble")
    found = replay(run, step, hush, trust=True)
    assert found.repeated
    assert (step, found.loss, found.grad_norm) in list(curve(run))
    assert found.inspection.culprit is None


def test_a_damaged_checkpoint_is_passed_over_with_a_word(run: Path) -> None:
    shutil.rmtree(run / "trouble")
    damaged = run / "checkpoints" / "step-00000006"
    (damaged / "model.safetensors").write_bytes(b"cut")
    words: list[str] = []
    found = replay(run, 8, words.append, trust=True)
    assert words[0].startswith(f"{damaged} is passed over: ")
    assert "model.safetensors" in words[0]
    assert Path(found.start).name == "step-00000003"
    assert found.repeated


def test_the_command_tells_and_writes_json(run: Path, drivetrain: Call) -> None:
    code, out, err = drivetrain("replay", "--trust", str(run), "--step", str(STEP))
    assert code == 0
    [kept] = (run / "trouble").glob("*/step-*")
    assert f"starting from {kept}" in err, "a path is not wrapped"
    for part in ("the same to the bit", "of first (Linear)", f"not finite by themselves: {BAD}", "numerics.skip=true"):
        assert part in out
    code, out, _ = drivetrain("replay", "--trust", str(run), "--step", str(STEP), "--json")
    values = json.loads(out)
    assert values["loss"] is None
    assert values["not_finite"]["loss"] == "nan"
    assert [layer["name"] for layer in values["inspection"]["layers"]] == ["first", "drop", "last", "the model"]


def test_what_cannot_be_replayed_is_refused(run: Path, drivetrain: Call) -> None:
    code, _, err = drivetrain("replay", "--trust", str(run), "--step", "11")
    assert code == 2
    assert "11 was given, and the run has 10 steps give 1 to 10" in err
    code, _, err = drivetrain("replay", str(run / "checkpoints"), "--step", "1")
    assert code == 2
    assert "holds no run.yaml" in err
    code, _, err = drivetrain("replay", "--trust", str(run), "--step", str(STEP + 1))
    assert code == 1
    assert f"step {STEP}: the loss is nan" in err


def test_a_stopped_run_goes_on_without_its_bad_steps(run: Path, failed: Path, drivetrain: Call) -> None:
    file = str(failed.parent / "run.yaml")
    (run / "trouble" / "step-mine").mkdir()  # somebody's own
    code, _, err = drivetrain("train", file, f"output={run}", "--resume", "numerics.skip=true")
    assert code == 0
    assert f"step {STEP}: the loss is nan; its update was left out" in err
    report = json.loads((run / "report.json").read_text())
    assert (report["steps"], report["skipped_steps"]) == (10, 1)
    assert f"of steps that are made again: {run / 'trouble'} keeps former-step-{STEP:08d}" in " ".join(err.split())
    names = sorted(path.name for path in (run / "trouble").iterdir())
    assert names == [f"former-step-{STEP:08d}", f"step-{STEP:08d}", "step-mine"]


@pytest.mark.parametrize("bound", ["micro_batch_tokens=40", "micro_batch_tokens=null"])
def test_answers_that_the_model_made_are_noted_and_shown_as_the_step_had_them(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Steps 3 and 4 learn from the answers made after step 2, a half each: six at once, or in micro-batches of at most
    40 tokens."""
    odd = dict.fromkeys([4], "the loss is odd")
    monkeypatch.setattr(step_guard, "not_finite", lambda numbers, _: odd.get(numbers.step))
    file, run = run_file(tmp_path), tmp_path / "run"
    code, _, err = drivetrain("train", str(file), bound, "--quiet")
    assert code == 1
    assert "(from 0) of those that the model made after step 2" in " ".join(err.split())
    noted = json.loads((run / "trouble" / "step-00000004" / "trouble.json").read_text())
    monkeypatch.undo()
    found = replay(run, 4, hush, trust=True)
    assert found.repeated
    assert (found.made_at, noted["made_at"]) == (2, 2)
    assert noted["micro_batches"] == [found.micro_batches]
    assert (len(found.micro_batches) > 1) is ("40" in bound)
    assert sorted(chain(*found.micro_batches)) == sorted(found.samples) == sorted(noted["samples"])
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    made = [each for each in lines if each["step"] == 2]
    for index, text in found.shown.items():
        assert made[index]["prompt"] in text
        assert made[index]["answer"] in text


@pytest.mark.long
def test_a_step_is_replayed_as_it_was_cut_when_memory_had_run_out(tmp_path: Path, drivetrain: Call) -> None:
    short = "        if len(x) > 4: raise torch.OutOfMemoryError('CUDA out of memory')\n        return self.last"
    (tmp_path / "net.py").write_text(MODULE.format(bad=BAD).replace("        return self.last", short))
    (tmp_path / "run.yaml").write_text(RUN.format(module=tmp_path / "net.py"))
    assert drivetrain("train", str(tmp_path / "run.yaml"), f"output={tmp_path / 'out'}")[0] == 1
    for step in (5, STEP):
        found = replay(tmp_path / "out", step, hush, trust=True)
        assert [len(piece) for piece in found.micro_batches] == [4] * 5
        assert found.repeated


def test_a_run_of_many_processes_is_replayed_in_one_with_the_same_batches() -> None:
    raw = {"workload": {"type": "module", "path": "net.py"}, "loop": {"steps": 3}}
    spread = {"engine": "fsdp", "processes": 4, "nodes": 2, "batch_size_per_device": 3}
    first, problems = validate(raw | spread, [])
    assert first is not None
    assert not problems
    alone = on_one_process(first)
    assert (alone.engine.name, alone.world_size, alone.global_batch, alone.micro_batch) == ("single", 1, 24, 3)
    masters, _ = validate(raw | spread | {"precision": "bf16-master"}, [])
    assert masters is not None
    assert (on_one_process(masters).engine.name, on_one_process(masters).world_size) == ("single", 1)
