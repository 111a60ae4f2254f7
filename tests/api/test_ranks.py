"""drivetrain.train in several processes: from a script without a guard, with what only that script defines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.errors import UserError
from drivetrain.objects import carry

SCRIPT = """
import threading, os, sys
import torch
from torch import nn
import drivetrain
from beside import SCALE  # lies beside the script, not in the current folder

generator = torch.Generator().manual_seed(0)
x = torch.randn(64, 4, generator=generator)
y = (x.sum(1) > 0).long()


def make():
    class Local(nn.Module):  # of a function
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, inputs):
            return self.layer(inputs) * SCALE

    torch.manual_seed(1)
    return Local()


class Pairs:
    def __init__(self, fails=False):
        self.fails = fails

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        if self.fails and os.environ.get("RANK") == "1":
            return self.broken(index)
        return x[index], y[index]

    def broken(self, index):
        raise KeyError(f"only rank 1 sees this")


def trained(net, data, name, **given):
    return drivetrain.train(
        model=net, train_data=data, loss=lambda output, target: nn.functional.cross_entropy(output, target),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5), batch_size=16, epochs=2, quiet=True,
        output=name, **given,
    )


alone, two = make(), make()
trained(alone, Pairs(), "alone")
trained(two, Pairs(), "two", engine="ddp", processes=2)
print("largest", max((a - b).abs().max().item() for a, b in zip(alone.parameters(), two.parameters())))

locked = Pairs()
locked.lock = threading.Lock()
try:
    trained(make(), locked, "locked", engine="ddp", processes=2)
except drivetrain.UserError as error:
    print("refused", error.problems[0].field, error.problems[0].why)
print("begun", os.path.exists("locked"))

try:
    trained(make(), Pairs(fails=True), "fails", engine="ddp", processes=2)
except drivetrain.RunError as error:
    print("failed", str(error).replace(chr(10), "|"))
except drivetrain.UserError as error:
    print("failed", str(error).replace(chr(10), "|"))
"""


@pytest.mark.long
def test_a_script_without_a_guard_trains_what_only_it_defines(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("SCALE = 2.0\n")
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    command = [sys.executable, "scripts/script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=400, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    words = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert float(words["largest"]) < 1e-6
    assert "train_data" in words["refused"]
    assert "(train_data.lock)" in words["refused"]
    assert words["begun"] == "False"
    assert "only rank 1 sees this" in words["failed"]
    assert "rank 1" in words["failed"]


def test_tensors_travel_beside_the_pickle_and_stay_what_they_are(tmp_path: Path) -> None:
    linear = nn.Linear(3, 3)
    tied = nn.ModuleList([linear, linear])
    objects = {
        "model": tied,
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "truths": torch.tensor([True, False]),
        "loss": lambda output: output + 1,
    }
    carry.write(objects, tmp_path)
    found = carry.read(tmp_path)
    for name in ("half", "scalar", "empty", "truths"):
        assert torch.equal(found[name], objects[name])  # type: ignore[arg-type]
        assert found[name].dtype is objects[name].dtype  # type: ignore[attr-defined]
    assert found["model"][0].weight is found["model"][1].weight
    assert torch.equal(found["model"][0].weight, linear.weight)
    assert found["model"][0].weight.requires_grad
    found["model"][0].weight.data.fill_(0)  # a copy of this process's own
    assert torch.equal(carry.read(tmp_path)["model"][0].weight, linear.weight)
    assert found["loss"](1) == 2
    assert (tmp_path / carry.OBJECTS).stat().st_size < 20_000


def test_everything_that_cannot_travel_is_named_at_once(tmp_path: Path) -> None:
    rows = (number for number in range(3))
    with pytest.raises(UserError) as caught, (tmp_path / "x").open("w") as file:
        carry.write({"train_data": {"rows": [rows]}, "collate": file, "loss": nn.MSELoss()}, tmp_path)
    assert [each.field for each in caught.value.problems] == ["train_data", "collate"]
    assert "train_data['rows'][0]" in caught.value.problems[0].why
