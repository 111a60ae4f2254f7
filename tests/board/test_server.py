"""A board as a user starts it: its process is killed, and what it started goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

MODULE = """\
import torch, time
from torch import nn
from torch.utils.data import TensorDataset
x = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
model, loss = nn.Linear(10, 1), nn.MSELoss()
train_data = TensorDataset(x, x.sum(1, keepdim=True))
"""
RUN = """\
workload: {{type: module, path: {path}}}
batch_size: 32
loop: {{steps: {steps}}}
optimizer: {{name: sgd, lr: 0.05}}
name: {name}
"""


class Started:
    """A board in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "board.txt"
        command = [sys.executable, "-m", "drivetrain", "board", "--port", "0", "--runs", "runs"]
        with self._log.open("w") as printed:
            self.process = subprocess.Popen(command, cwd=folder, stderr=printed)
        self.url, self.token = "", ""
        until(self._is_ready)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None
        found = re.search(r"(http://\S+)/login#(\S+)", self._log.read_text())
        self.url, self.token = found.groups() if found else ("", "")
        return found is not None

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or "null")

    def status(self, name: str) -> str:
        try:
            return str(self.ask(f"runs/{name}")["status"])
        except urllib.error.HTTPError:
            return "none"

    def train(self, folder: Path, name: str, steps: int) -> Any:
        text = RUN.format(path=folder / "mine.py", steps=steps, name=name)
        return self.ask("queue", {"key": f"the key of {name}", "yaml": text})

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def until(what: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


@contextmanager
def place(folder: Path) -> Iterator[Path]:
    """A folder with a workload; in the end nothing works there."""
    (folder / "mine.py").write_text(MODULE)
    try:
        yield folder
    finally:
        for each in psutil.process_iter(["cmdline", "pid"]):
            if str(folder) in " ".join(each.info["cmdline"] or ()) and each.pid != os.getpid():
                each.kill()


def starts(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "run_started"]


@pytest.mark.long
def test_runs_outlive_a_killed_server_and_stop_save_and_resume(tmp_path: Path) -> None:
    with place(tmp_path):
        board = Started(tmp_path)
        first = board.train(tmp_path, "long", 10**7)
        board.train(tmp_path, "short", 20)
        until(lambda: board.status("long") == "running")
        keeper = json.loads((tmp_path / "runs/.board/entries" / first["id"] / "claim.json").read_text())["process"]
        board.kill()
        assert psutil.pid_exists(keeper)
        board = Started(tmp_path)
        assert (board.status("long"), board.status("short")) == ("running", "queued")
        assert board.train(tmp_path, "long", 10**7)["id"] == first["id"], "the same form, sent again"
        step = board.ask("runs/long")["step"]
        until(lambda: board.ask("runs/long")["step"] > step)
        board.ask("runs/long/stop", {})
        until(lambda: board.status("long") == "interrupted")
        assert board.ask("queue/" + first["id"] + "/log")["ended"]
        until(lambda: board.status("short") == "completed")
        assert len(starts(tmp_path, "long")) == len(starts(tmp_path, "short")) == 1
        stopped_at = board.ask("runs/long")["step"]
        assert board.ask("runs/long")["checkpoints"][0]["last"]
        board.ask("runs/long/resume", {"key": "the key of going on"})
        until(lambda: len(starts(tmp_path, "long")) == 2)
        assert starts(tmp_path, "long")[1]["first_step"] >= stopped_at
        until(lambda: board.status("long") == "running")
        board.ask("runs/long/kill", {})
        until(lambda: board.status("long") == "interrupted")
        assert board.ask("runs/long")["message"] == "ended at once by admin"
        assert board.ask("runs/long", method="DELETE")["bytes"] > 0
        assert not (tmp_path / "runs/long").exists()
        board.process.send_signal(signal.SIGTERM)
        assert board.process.wait(30) == 0


@pytest.mark.slow
def test_three_running_and_four_queued_survive_a_kill_and_none_starts_twice(tmp_path: Path) -> None:
    with place(tmp_path):
        board = Started(tmp_path)
        board.ask("queue/settings", {"at_once_cpu": 3})
        for number in range(3):
            board.train(tmp_path, f"long-{number}", 10**7)
        for number in range(4):
            board.train(tmp_path, f"short-{number}", 20)
        until(lambda: all(board.status(f"long-{number}") == "running" for number in range(3)))
        shown = board.ask("runs")
        board.kill()
        board = Started(tmp_path)
        again = board.ask("runs")
        keys = ("name", "status", "entry", "created")
        assert [[each[key] for key in keys] for each in again["runs"]] == [
            [each[key] for key in keys] for each in shown["runs"]
        ]
        for number in range(3):
            board.ask(f"runs/long-{number}/kill", {})
        until(lambda: all(board.status(f"short-{number}") == "completed" for number in range(4)))
        names = [*(f"long-{number}" for number in range(3)), *(f"short-{number}" for number in range(4))]
        assert [len(starts(tmp_path, name)) for name in names] == [1] * 7
        board.kill()


def test_a_second_board_on_the_same_runs_is_refused(tmp_path: Path) -> None:
    with place(tmp_path):
        board = Started(tmp_path)
        command = [sys.executable, "-m", "drivetrain", "board", "--port", "0", "--runs", "runs"]
        other = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert other.returncode == 2
        assert "a board is open on" in other.stderr
        board.kill()
