"""All that a run leaves in its folder, its checkpoints among it, is written through runtime/storage.py."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.runtime import storage
from tests.tiny_language import LLAMA, write_lines
from tests.workloads.policy_cases import ROWS

BY = {"runtime/storage.py", "runtime/atomic_file.py", "runtime/lock.py"}
WATCHED = """
import json, os, sys
from pathlib import Path

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree")
PACKAGE, seen, watching = "/drivetrain/", set(), True

def watch(event, given):
    if not watching or event != "open" and event not in CHANGES:
        return
    if event == "open" and not (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    path = str(given[1 if event == "os.symlink" else 0])
    if not os.path.abspath(path).startswith(os.path.abspath("out")):
        return
    frame = sys._getframe(1)
    while frame is not None and PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    by = frame.f_code.co_filename.rpartition(PACKAGE)[2] if frame else "no file of the package"
    if by.startswith(("workloads/", "models/")) and ".partial-" in path:
        return  # what a workload puts beside the weights, into the folder that is written aside
    seen.add((by, event, Path(path).name))

sys.addaudithook(watch)
from drivetrain.cli import main
for words in sys.argv[1:]:
    try:
        main(["train", "run.yaml", *words.split(), "--quiet"])
    except SystemExit as ended:
        assert ended.code == 0, words
watching = False
Path("seen.json").write_text(json.dumps(sorted(seen)))
"""
MODULE = """
import torch
from torch import nn

train_data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
evaluation_data = train_data
model = nn.Linear(4, 1)
loss = nn.MSELoss()
"""
RUN = """
workload: {type: module, path: module.py}
output: out
batch_size: 8
loop: {steps: 6}
optimizer: {name: adamw, lr: 0.01}
evaluation: {every_steps: 2}
checkpoints: {every_steps: 2, keep_last: 1}
"""


REWARDED = {
    "workload": {
        "type": "language_model",
        "stage": "grpo",
        "model": {"config": LLAMA},
        "data": {"train": "rows.jsonl", "template": "plain", "length": 24, "cache": "cache"},
        "reinforcement": {"rewards": {"use": "length", "options": {"most": 8, "over": 8}}, "max_new_tokens": 4},
    },
    "output": "out",
    "batch_size": 2,
    "loop": {"steps": 5},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "evaluation": {"every_steps": 5},
    "checkpoints": {"every_steps": 1, "keep_last": 1, "keep_best": 0},
}


def watched(folder: Path, *commands: str) -> list[tuple[str, str, str]]:
    """Returns (file of the package, event, name) of all that these trainings changed in the run's folder."""
    command = [sys.executable, "-c", WATCHED, *commands]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads((folder / "seen.json").read_text())]


@pytest.mark.long
def test_answers_and_rewards_are_kept_through_the_storage_and_do_not_grow_with_the_run(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "run.yaml").write_text(json.dumps(REWARDED))
    seen = watched(tmp_path, "loop.steps=5")
    assert not [each for each in seen if each[0] not in BY]
    assert "rank-0.jsonl" in {name for by, event, name in seen if by == "runtime/storage.py" and event == "open"}
    kept = (tmp_path / "out" / "journal" / "rank-0.jsonl").read_text().splitlines()
    assert {json.loads(line)[0] for line in kept} == {4}, "those that the checkpoint of step 4 covers are gone"


def test_all_that_a_run_writes_in_its_folder_goes_through_the_storage(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(RUN)
    seen = watched(tmp_path, "loop.steps=6", "loop.steps=9 --resume", "loop.steps=3 --overwrite")
    assert not [each for each in seen if each[0] not in BY]
    files = {name for by, event, name in seen if by == "runtime/storage.py" and event == "open"}
    assert {"events.jsonl", "model.safetensors", "optimizer.json", "manifest.json"} <= files, "the hook saw them"
    assert {"os.rename", "os.symlink", "shutil.rmtree"} <= {event for _, event, _ in seen}


def test_a_folder_is_published_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    target, aside = tmp_path / "target", tmp_path / ".aside"
    for text in ("first", "second"):
        storage.begin(aside)
        storage.put(aside / "file", text)
        storage.publish(aside, target, tmp_path / ".earlier")
        assert (target / "file").read_text() == text
        assert storage.entries(tmp_path) == [target]


def test_a_file_may_be_rewritten_from_itself(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo\nthree\n")
    with file.open("rb") as lines:
        storage.rewrite(file, (line for line in lines if line != b"two\n"))
    assert file.read_bytes() == b"one\nthree\n"
    with pytest.raises(ZeroDivisionError):
        storage.rewrite(file, (b"1" * (1 // number) for number in (1, 0)))
    assert file.read_bytes() == b"one\nthree\n"
    assert storage.entries(tmp_path) == [file], "nothing is left beside it"


def test_a_folder_that_cannot_be_renamed_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    storage.make(folder / "within")

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", busy)
        with pytest.raises(OSError, match="busy"):
            storage.delete(folder, tmp_path / ".deleted")
    assert (folder / "within").is_dir()
    storage.delete(folder, tmp_path / ".deleted")
    assert storage.entries(tmp_path) == []
