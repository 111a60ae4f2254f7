"""The folder that mutants work in: a finished tiny run, its files, others' configurations, and odd files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from drivetrain.cli import main

WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x = torch.randn(24, 4)
model = nn.Linear(4, 1)
loss = nn.MSELoss()
train_data = TensorDataset(x[:16], x[:16].sum(1, keepdim=True))
evaluation_data = TensorDataset(x[16:], x[16:].sum(1, keepdim=True))
"""
RUN = """
workload: {type: module, path: linear.py}
batch_size: 8
loop: {steps: 2}
optimizer: {name: sgd, lr: 0.05}
evaluation: {every_steps: 1}
"""
TALKS = [{"instruction": f"say {number}", "output": f"it is {number}"} for number in range(8)]
LANGUAGE = """
workload:
  type: language_model
  stage: sft
  model:
    config: {model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1}
  data: {train: talks, registry: dataset_info.json, length: 32, template: alpaca, cache: cache}
batch_size: 4
loop: {steps: 1}
"""
TEXTS = {
    "linear.py": WORKLOAD,
    "run.yaml": RUN,
    "talks.yaml": LANGUAGE,
    "talks.json": json.dumps(TALKS),
    "dataset_info.json": json.dumps({"talks": {"file_name": "talks.json"}}),
    "ds.json": json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}}),
    "accelerate.yaml": "distributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_processes: 2\n",
    "arguments.json": json.dumps({"output_dir": "out", "learning_rate": 1e-3, "max_steps": 3}),
    "factory.yaml": "stage: sft\ntemplate: alpaca\ndataset: talks\nlearning_rate: 1.0e-4\nnum_train_epochs: 1.0\n",
    "xtuner.py": "lr = 1e-4\nbatch_size = 4\ntrain_cfg = dict(type='TrainLoop', max_epochs=1)\n",
    "text.txt": "some words\n",
    "empty": "",
    "deep.json": "[" * 50_000,
    "bomb.yaml": "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*{'a' if not i else f'b{i - 1}'}, x]\n" for i in range(90)),
}


def furnish(folder: Path) -> None:
    """Fill an empty folder, which becomes the current one, and train the tiny run in it."""
    os.chdir(folder)
    for name, text in TEXTS.items():
        Path(name).write_text(text)
    Path("binary.bin").write_bytes(bytes(range(256)) * 4)
    Path("latin.yaml").write_bytes("name: caf\u00e9\n".encode("latin-1"))
    Path("folder").mkdir()
    for arguments in (
        ["train", "run.yaml", "--quiet"],
        ["checkpoint", "convert", "runs/run", "--to", "accelerate", "--output", "exported"],
        ["checkpoint", "convert", "runs/run", "--to", "dcp", "--output", "dcp"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code in (0, None), arguments
    for name in ("fifo", "fifo.yaml", "fifo.csv"):
        os.mkfifo(name)
    for name in ("loop", "loop.yaml", "loop.csv"):
        Path(name).symlink_to(name)
    Path("nothing").symlink_to("nowhere")
    Path("zero").symlink_to("/dev/zero")


def copied(template: Path, folder: Path) -> None:
    """The same again, with its pipes and links."""
    folder.mkdir()
    for path in sorted(template.rglob("*")):
        target = folder / path.relative_to(template)
        kind = path.lstat().st_mode
        if stat.S_ISDIR(kind):
            target.mkdir()
        elif stat.S_ISLNK(kind):
            target.symlink_to(path.readlink())
        elif stat.S_ISFIFO(kind):
            os.mkfifo(target)
        else:
            shutil.copy2(path, target)


def contents(folder: Path) -> dict[str, str]:
    """Path → what is there: the kind of file, and a sum of what a regular one holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        kind = path.lstat().st_mode
        held = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(kind) else ""
        held = str(path.readlink()) if stat.S_ISLNK(kind) else held
        found[path.relative_to(folder).as_posix()] = f"{stat.S_IFMT(kind):o} {held}"
    return found
