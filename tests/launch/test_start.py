"""Runs of several processes, started as a user starts them: one report, one error, one Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.checkpoint.directory import load, newest_good
from drivetrain.checkpoint.state import same
from drivetrain.cli import main
from drivetrain.tracking.jsonl import read_events

WORKLOAD = """
import os, time, torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(64, 6)
targets = (inputs @ torch.randn(6, 4)).argmax(1)

class Data:
    def __init__(self, start, end):
        self.range = range(start, end)
    def __len__(self):
        return len(self.range)
    def __getitem__(self, i):
        return inputs[self.range[i]], targets[self.range[i]]

class Model(nn.Sequential):
    steps = 0
    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            Model.steps += 1
            HOOK
        return super().forward(x)

def build_model():
    return Model(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))

train_data, evaluation_data = Data(0, 44), Data(44, 64)
loss = nn.CrossEntropyLoss()
"""
RUN = """
workload: {type: module, path: workload.py}
batch_size: 8
loop: {steps: 12, max_grad_norm: 1.0}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
evaluation: {every_steps: 6}
tracking: {log_every: 1}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def prepared(folder: Path, hook: str = "pass") -> Path:
    (folder / "workload.py").write_text(WORKLOAD.replace("HOOK", hook))
    (folder / "run.yaml").write_text(RUN)
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "drivetrain", *arguments]


def finished(folder: Path, *arguments: str, code: int = 0, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def finished_here(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """As finished, in this process: the seconds that a start spends on imports are saved. For runs of one process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main(list(arguments))
    assert ended.value.code == code, out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def losses(folder: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_events(folder / "events.jsonl") if e["event"] == "step"}


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.mark.long
def test_ranks_train_and_evaluate_as_one(place: Path) -> None:
    finished_here(place, "train", "run.yaml", "output=one")
    done = finished(place, "train", "run.yaml", "engine=fsdp", "processes=2", "output=two")
    assert losses(place / "two") == pytest.approx(losses(place / "one"), rel=1e-5)
    assert done.stdout.count("completed") == 1, "one report"
    assert len(re.findall(r"evaluation +loss|evaluation +accuracy", done.stderr)) == 2, "one progress"
    both = report(place / "two")
    assert both["engaged"]["world_size"] == 2
    assert [rank["rank"] for rank in both["ranks"]] == [0, 1]
    held = [rank["local_parameters"] for rank in both["ranks"]]
    assert sum(held) == both["engaged"]["global_parameters"]
    assert both["samples"] == 12 * 8 - 2 * 4, "the last batch of an epoch has 4"
    assert both["metrics"] == pytest.approx(report(place / "one")["metrics"], rel=1e-5)
    # with the same checkpoint, on one process and on two
    spread = ("engine=ddp", "processes=2", "evaluation.batch_size=4", "output=two")
    alone = ("evaluation.batch_size=4", "output=two")
    one = json.loads(finished_here(place, "evaluate", "run.yaml", *alone).stdout)
    two = json.loads(finished(place, "evaluate", "run.yaml", *spread).stdout)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-6)


@pytest.mark.slow  # tests/test_adapter_ranks.py predicts over two ranks too, and tests/parity over all engines
def test_ranks_print_the_predictions_of_one_process(place: Path) -> None:
    finished_here(place, "train", "run.yaml", "output=one")
    finished_here(place, "predict", "run.yaml", "output=one", "--output", "one.jsonl")
    spread = ("engine=ddp", "processes=2", "evaluation.batch_size=4", "output=one")
    shown = finished(place, "predict", "run.yaml", *spread).stdout
    assert shown == (place / "one.jsonl").read_text()


@pytest.mark.slow  # diagnostics/test_stranded_ranks.py sees the same words
def test_a_ranks_error_is_reported_once_with_its_rank(tmp_path: Path) -> None:
    failing = 'if Model.steps == 3 and os.environ.get("RANK") == "1": raise ValueError("this one broke")'
    done = finished(prepared(tmp_path, failing), "train", "run.yaml", "engine=fsdp", "processes=2", code=1)
    assert done.stderr.count("rank 1: ValueError: this one broke") == 1
    assert done.stderr.count("Traceback") == 1, "of that rank alone"


def test_a_users_mistake_is_reported_once_without_a_traceback(place: Path) -> None:
    (place / "workload.py").write_text((place / "workload.py").read_text() + "\nloss = lambda output, target: output\n")
    done = finished(place, "train", "run.yaml", "engine=ddp", "processes=2", code=2)
    assert done.stderr.count("not one number") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # test_restarts.py sees the cause of each death; its words are tested there and in test_outcome.py
def test_a_rank_that_is_killed_ends_the_run_with_its_number(tmp_path: Path) -> None:
    killing = 'if Model.steps == 3 and os.environ.get("RANK") == "1": time.sleep(1.5); os.kill(os.getpid(), 9)'
    done = finished(prepared(tmp_path, killing), "train", "run.yaml", "engine=ddp", "processes=2", code=1)
    reported = " ".join(done.stderr.split())
    assert "rank 1 was ended by SIGKILL in step" in reported
    likely = r"most likely by the kernel, because the machine's memory ran out; last resident size: 0\.[1-9] GiB"
    assert re.search(likely, reported), "its heart recorded it each second"
    assert "Try fewer processes, engine.meta=true" in reported


# that a run of ranks goes on from a checkpoint to the same bits is also shown by test_restarts.py
@pytest.mark.parametrize(
    ("number", "code", "goes_on"),
    [
        (signal.SIGINT, 130, False),
        pytest.param(signal.SIGINT, 130, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_on_all_ranks_and_the_run_goes_on_with_the_same_bits(
    tmp_path: Path, number: signal.Signals, code: int, goes_on: bool
) -> None:
    folder = prepared(tmp_path, "time.sleep(0.1)")
    spread = ("train", "run.yaml", "engine=ddp", "processes=2", "loop.steps=40", "evaluation.every_steps=20")
    process = subprocess.Popen(
        command(*spread, "output=half"), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_step(folder / "half" / "events.jsonl", 3)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.send_signal(number)
    reported, _ = process.communicate(timeout=120)
    assert process.returncode == code, reported
    assert "--resume" in reported
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    assert 3 <= int(newest(folder / "half").name.removeprefix("step-")) < 40, "saved where it was, not at an end"
    if not goes_on:
        return
    finished(folder, *spread, "output=half", "--resume")
    finished(folder, *spread, "output=whole")
    whole, half = (load(newest(folder / name)) for name in ("whole", "half"))
    assert same(whole["model"], half["model"])
    assert same(whole["optimizer"], half["optimizer"])
    assert losses(folder / "half") == losses(folder / "whole")


@pytest.mark.parametrize(
    ("step", "words"),
    [(3, "Interrupted before anything was saved."), (8, "step-00000006 is lost, from which --resume goes on.")],
)
def test_who_does_not_wait_for_the_save_hears_what_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drivetrain: Callable[..., tuple[int, str, str]],
    step: int,
    words: str,
) -> None:
    monkeypatch.chdir(prepared(tmp_path, f"if Model.steps == {step}: raise KeyboardInterrupt"))
    code, _, reported = drivetrain("train", "run.yaml", "output=run")
    assert code == 130
    assert words in reported


@pytest.mark.slow  # runtime/test_lock.py kills one too
def test_a_killed_parent_leaves_no_rank(tmp_path: Path) -> None:
    folder = prepared(tmp_path, "time.sleep(0.1)")
    process = subprocess.Popen(
        command("train", "run.yaml", "engine=ddp", "processes=2", "loop.steps=1000", "output=run"),
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for_step(folder / "run" / "events.jsonl", 2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=20)
    assert gone
    assert not alive


@pytest.mark.slow  # test_restarts.py has two that meet, of which one is lost
def test_two_nodes_meet_and_train_as_one(place: Path) -> None:
    finished_here(place, "train", "run.yaml", "output=one")
    meeting = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}")
    nodes = [
        subprocess.Popen(
            command("train", "run.yaml", "engine=ddp", "processes=1", "output=two", *meeting, "--node-rank", str(rank)),
            cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    reported = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], reported
    assert sum("completed" in text for text in reported) == 1, "one report"
    assert losses(place / "two") == pytest.approx(losses(place / "one"), rel=1e-5)
    assert report(place / "two")["engaged"]["world_size"] == 2


def newest(folder: Path) -> Path:
    found, _ = newest_good(folder / "checkpoints")
    assert found is not None
    return found


def wait_for_step(events: Path, step: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if events.exists() and any(e.get("step", 0) >= step for e in read_events(events) if e["event"] == "step"):
            return
        time.sleep(0.1)
    raise AssertionError(f"{events} did not come to step {step}")


def free_port() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.slow  # test_recipes.py starts ranks in its own process too, and sees that its environment is as before
def test_environment_of_this_process_is_left_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.config.load import load as load_run
    from drivetrain.launch.job import Job
    from drivetrain.launch.start import start

    monkeypatch.chdir(place)
    run, problems = load_run(place / "run.yaml", ["engine=ddp", "processes=2", "loop.steps=2", "tracking.trackers=[]"])
    assert run is not None
    assert not problems
    before = dict(os.environ)
    result = start(Job(verb="train", run=run, quiet=True))
    assert result.code == 0
    assert result.value["engaged"]["world_size"] == 2
    added = {key: value for key, value in os.environ.items() if before.get(key) != value}
    assert not {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "RANK"} & added.keys()
