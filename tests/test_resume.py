"""Exact resume: a run killed at any moment ends with the same bits as one that was never touched."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess as Child
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint.directory import load, newest_good, steps, verify
from drivetrain.checkpoint.state import same
from drivetrain.tracking.jsonl import read_events
from tests import ranks
from tests.device import chosen_device
from tests.launch.history import check_each_once, recorded_main, surviving

RUN = """
workload:
  type: image_classification
  model:
    config: {model_type: vit, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32,
             patch_size: 4, hidden_dropout_prob: 0.1}
  data: {source: digits, crop_padding: 1, flip: true, limit_evaluation: 50}
precision: fp16-mixed
scaler: {growth_interval: 7}
batch_size: 48
micro_batch_size: 20
loop: {steps: 300, max_grad_norm: 1.0}
optimizer: {name: adamw, lr: 1.0e-3, weight_decay: 0.1}
schedule: {name: cosine, warmup_steps: 20}
evaluation: {every_steps: 50}
checkpoints: {every_steps: 4, keep_last: 2, keep_best: 1}
tracking: {log_every: 1}
"""
ON_DEVICE = (f"device={chosen_device()}", *(["deterministic=true"] if chosen_device() != "cpu" else []))

pytestmark = pytest.mark.usefixtures("device")


def start(run_file: Path, output: Path, *options: str) -> Child:
    arguments = ["train", str(run_file), f"output={output}", *ON_DEVICE, "--quiet", *options]
    return ranks.start(recorded_main, arguments, samples_of(output))


def samples_of(output: Path) -> Path:
    return output.with_name(f"{output.name}-samples")


def finish(process: Child) -> None:
    process.join(180)
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.fixture(scope="module")
def uninterrupted(run_file: Path) -> Callable[[int], Path]:
    """Number of steps → the folder of such a run."""

    @functools.cache
    def of(steps: int) -> Path:
        output = run_file.parent / f"uninterrupted-{steps}"
        finish(start(run_file, output, f"loop.steps={steps}"))
        return output

    return of


def saved_step(output: Path) -> int:
    newest, _ = newest_good(output / "checkpoints")
    return int(newest.name.removeprefix("step-")) if newest else 0


def wait_for_kill_moment(process: Child, output: Path, dice: random.Random, while_saving: bool) -> None:
    """Until the run steps, then a random moment more; or until a half-written checkpoint is seen."""
    events = output / "events.jsonl"
    before = events.stat().st_size if events.exists() else 0
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        if while_saving:
            if any((output / "checkpoints").glob(".step-*.partial-*")):
                return
        elif events.exists() and events.stat().st_size > before + 2000:
            time.sleep(dice.uniform(0.0, 0.3))
            return
        time.sleep(0.0005)


@pytest.mark.long
@pytest.mark.parametrize(
    ("times", "total", "different"), [(2, 72, 1), pytest.param(10, 300, 4, marks=pytest.mark.slow)], ids=["two", "ten"]
)
def test_killed_again_and_again_also_while_saving_ends_with_the_same_bits(
    times: int, total: int, different: int, run_file: Path, uninterrupted: Callable[[int], Path]
) -> None:
    output, whole, dice = run_file.parent / f"killed-{times}", uninterrupted(total), random.Random(0)
    kills, moments, starts = 0, [], []
    process = start(run_file, output, f"loop.steps={total}")
    while kills < times:
        wait_for_kill_moment(process, output, dice, while_saving=kills % 2 == 1)
        assert process.is_alive(), f"the run ended after {kills} kills: make it longer"
        before = saved_steps(output)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        assert [verify(path) for path in steps(output / "checkpoints")] == [[]] * len(saved_steps(output))
        assert not before or saved_step(output) >= before[-1], "the newest one is lost"
        moments.append(saved_step(output))
        starts.append(len(started(output)))
        process = start(run_file, output, f"loop.steps={total}", "--resume")
    finish(process)
    assert len(set(moments)) >= different, f"the kills hit too few different moments: {moments}"

    theirs, ours = (newest_good(folder / "checkpoints")[0] for folder in (whole, output))
    assert theirs is not None
    assert ours is not None
    assert theirs.name == ours.name == f"step-{total:08d}"
    theirs_state, ours_state = load(theirs), load(ours)
    for part in ("model", "optimizer"):
        assert same(theirs_state[part], ours_state[part]), part
    assert same(theirs_state["training"]["generators"], ours_state["training"]["generators"])
    assert theirs_state["training"]["engine"] == ours_state["training"]["engine"]
    assert curve(whole) == curve(output)
    for start_number, moment in zip(starts, moments, strict=True):
        assert started(output)[start_number]["first_step"] == moment, "it goes on from the newest one"
    taken = surviving(samples_of(output))
    assert taken == surviving(samples_of(whole))
    check_each_once(taken, total, started(output)[0]["samples_per_epoch"])


def saved_steps(output: Path) -> list[int]:
    """Of whole checkpoints."""
    return [int(path.name.split("-")[1].split(".")[0]) for path in steps(output / "checkpoints")]


def started(output: Path) -> list[dict[str, Any]]:
    """Returns what each start reported."""
    events = output / "events.jsonl"
    return [event for event in read_events(events) if event["event"] == "run_started"] if events.exists() else []


def curve(output: Path) -> list[tuple[int, float, float]]:
    events = map(json.loads, (output / "events.jsonl").read_text().splitlines())
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events if e["event"] == "step"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_documented_code(
    run_file: Path, number: int, code: int, tmp_path: Path
) -> None:
    process = start(run_file, tmp_path / "out", "checkpoints.every_steps=1000", "evaluation.every_steps=1000")
    events = tmp_path / "out" / "events.jsonl"
    while process.is_alive() and not (events.exists() and '"step"' in events.read_text()):
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code
    assert saved_step(tmp_path / "out") > 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["status"] == "interrupted"
