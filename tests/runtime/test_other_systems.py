"""One device without what only Linux has. It stands in for macOS, on which nothing was ever run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT = '''
import builtins, io, os, pathlib, signal, sys

import psutil  # it reads /proc itself on Linux, and has a build for each system
import torch

class Hidden:
    """Finds no module that reaches into the kernel."""
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ("fcntl", "resource"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
for module, names in {
    signal: ("SIGKILL SIGUSR1 SIGUSR2 SIGHUP SIGQUIT SIGCHLD SIGCONT SIGSTOP SIGALRM SIGRTMIN SIGRTMAX "
             "pthread_sigmask pthread_kill sigwaitinfo sigtimedwait sigpending setitimer SIG_BLOCK SIG_UNBLOCK"),
    os: ("sched_getaffinity posix_fallocate getuid geteuid getgid fork forkpty killpg getpgid setsid fchmod "
         "mkfifo getloadavg sysconf O_NOFOLLOW O_DIRECTORY"),
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

opened, ours = io.open, "drivetrain"

def refuse(path, mode="r", *rest, **named):
    """Opens what is not in /proc. psutil and torch may: they have a build for each system."""
    if str(path).startswith("/proc"):
        frame = sys._getframe(1)
        while "pathlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if ours in frame.f_globals.get("__name__", ""):
            asked.append(f"{path} by {frame.f_globals['__name__']}")
            raise FileNotFoundError(2, "there is no /proc here", str(path))
    return opened(path, mode, *rest, **named)

asked = []
io.open = builtins.open = refuse

import drivetrain
from drivetrain.cli import main

assert "fcntl" not in sys.modules
'''
MODULE = """
import torch
from torch import nn

train_data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
evaluation_data = train_data
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
loss = nn.MSELoss()
"""
RUN = """
workload: {type: module, path: module.py}
precision: bf16-mixed
batch_size: 8
loop: {epochs: 2}
optimizer: {name: adamw, lr: 0.01}
"""


def run(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        cwd=folder,
        env={**os.environ, "LOGNAME": "someone"},  # else torch asks for the user's number
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_one_device_trains_resumes_and_predicts_without_what_only_linux_has(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(RUN)
    words = run(
        tmp_path,
        """
for words in ("train run.yaml", "train run.yaml loop.epochs=3 --resume", "predict run.yaml --output rows.csv"):
    try:
        main(words.split())
    except SystemExit as ended:
        assert ended.code == 0, (words, ended.code)
assert asked  # the stand-in was met
""",
    )
    assert "resumed after step 16 of 24" in words
    assert "nothing keeps a second run out" in words
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 65


def test_objects_are_trained_from_python_without_what_only_linux_has(tmp_path: Path) -> None:
    code = """
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
report = drivetrain.train(model=nn.Linear(4, 1), train_data=data, loss=nn.MSELoss(), batch_size=8, epochs=1)
print(report.status)
"""
    assert "completed" in run(tmp_path, code)
