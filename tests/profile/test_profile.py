"""`drivetrain profile` as a user types it: on one process and on two ranks, with its page, its traces and its tries."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drivetrain.cli import profile_run
from drivetrain.cli.app import app
from drivetrain.errors import UserError

WORKLOAD = """
import time
import torch
from torch import nn

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((64,), float(index % 2)), index % 2

train_data = evaluation_data = Slow()
loss = nn.CrossEntropyLoss()

def build_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
"""
RUN = """
workload: {type: module, path: workload.py}
batch_size: 16
loop: {steps: 20}
optimizer: {name: sgd, lr: 0.1}
loader: {workers: 0}
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workload.py").write_text(WORKLOAD)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def profiled(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["profile", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_slow_data_set_is_found_and_more_workers_save_what_was_waited_for(run_file: Path) -> None:
    found = profiled(str(run_file), "--steps", "4", "--try")
    (rank,) = found["ranks"]
    assert rank["parts"]["data"] > 0.8 * 16 * 0.002
    assert list(rank["parts"])[:4] == ["data", "forward", "backward", "optimizer"]
    first = found["suggestions"][0]
    assert first["overrides"] == ["loader.workers=1"]
    (trial,) = [each for each in found["trials"] if each["overrides"] == first["overrides"]]
    assert trial["plain_seconds"] is not None
    folder = Path("profiles/run")
    page = (folder / "profile.html").read_text()
    assert "waiting for samples" in page
    assert "src=" not in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert json.loads((folder / "profile.json").read_text()) == found
    with gzip.open(folder / "rank-0.trace.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"part: data", "module: 0", "aten::addmm"} <= names
    assert not Path("runs").exists(), "nothing of the training is kept"


def test_the_screen_the_page_and_the_json_show_memory_by_category_over_the_step(run_file: Path) -> None:
    """Two layers of 64 x 64 and 64 x 2 with their biases: 4,290 parameters in fp32, and as many gradients."""
    shown = CliRunner().invoke(app, ["profile", str(run_file), "--steps", "1"], env={"COLUMNS": "200"})
    assert "memory by category" in shown.output
    memory = json.loads(Path("profiles/run/profile.json").read_text())["planned_memory"]
    over_step = memory["over_step"]
    held = 4 * (64 * 64 + 64 + 64 * 2 + 2)
    assert set(over_step["parts"]["parameters"]) == {held}
    assert max(map(sum, zip(*over_step["parts"].values(), strict=True))) == memory["allocated_bytes"]
    assert {"forward", "backward", "optimizer"} <= {*over_step["phases"]} == {*memory["phases"]}
    assert memory["phases"]["optimizer"]["gradients"] == held
    assert (
        "activations" not in memory["phases"]["optimizer"] or memory["phases"]["forward"]["activations"] > 16 * 64 * 4
    )
    page = Path("profiles/run/profile.html").read_text()
    assert "Memory by category" in page
    assert '<path class="activations"' in page


def test_two_ranks_show_what_they_exchange(run_file: Path) -> None:
    found = profiled(str(run_file), "engine=ddp", "processes=2", "--steps", "3", "-o", "here")
    assert len(found["ranks"]) == 2
    assert all(rank["exchange"] > 0 for rank in found["ranks"])
    assert all(rank["exposed_exchange"] <= rank["exchange"] for rank in found["ranks"])
    assert sorted(each.name for each in Path("here").glob("*.gz")) == ["rank-0.trace.json.gz", "rank-1.trace.json.gz"]


def test_a_run_of_one_step_is_profiled_as_a_longer_one_and_says_so(run_file: Path) -> None:
    found = profiled(str(run_file), "loop.steps=1", "--steps", "2")
    assert found["steps"] == 2
    assert found["plain_seconds"] > 0
    assert [each for each in found["notes"] if "the run has fewer steps than are profiled" in each]
    assert not [each for each in profiled(str(run_file), "--steps", "2")["notes"] if "fewer steps" in each]


def test_the_pages_of_plan_and_profile_share_one_style() -> None:
    """Each has rules of its own beside those that are shared, and repeats none of them."""
    shared = files("drivetrain.plan").joinpath("page_style.css").read_text(encoding="utf-8").splitlines()
    for package in ("drivetrain.plan", "drivetrain.profile"):
        lines = files(package).joinpath("page.html").read_text(encoding="utf-8").splitlines()
        assert "{{ style }}" in lines
        assert not {*shared} & {*lines}


def test_a_folder_that_cannot_be_written_is_refused_before_any_step(run_file: Path) -> None:
    Path("taken").write_text("a file")
    result = CliRunner().invoke(app, ["profile", str(run_file), "-o", "taken"])
    assert result.exit_code != 0
    assert "warm up" not in result.output


def test_a_run_on_several_nodes_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("workload.py").write_text(WORKLOAD)
    Path("run.yaml").write_text(RUN)
    with pytest.raises(UserError, match="nodes: 2 were given, and profile starts the ranks of one machine") as refused:
        profile_run.profile(Path("run.yaml"), ["engine=ddp", "nodes=2"], 1, tmp_path, 0, False, lambda _: None)
    assert [each.field for each in refused.value.problems] == ["nodes"]
