"""Cells spread over a Ray cluster of three nodes on this machine: at once, killed, interrupted, too large."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.tracking.jsonl import read_events
from tests.launch.ray_cluster import three_nodes
from tests.launch.test_start import command, prepared

pytest.importorskip("ray", reason="drivetrain[ray] is not installed")
WAITS = 'time.sleep(600 if os.path.exists("todo") and Model.steps == 3 else 0)'
WORDS = ("device=cpu", "loop.steps=6")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_nodes() as found:
        yield found


def started(folder: Path, address: str | None, *words: str) -> subprocess.Popen[str]:
    line = command("compare", "run.yaml", *WORDS, *words, *(() if address is None else ("--ray", address)))
    return subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def compared(folder: Path, address: str | None, *words: str, code: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Returns the rows of a comparison, and what it wrote meanwhile."""
    process = started(folder, address, *words)
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, out + err
    [output] = [word.removeprefix("--output=") for word in words if word.startswith("--output=")]
    found = json.loads((folder / output / "comparison.json").read_text())["rows"]
    return [{**row, "losses": losses(folder, row)} for row in found], err


@pytest.mark.long
def test_cells_run_at_once_with_the_curves_of_one_machine_also_one_that_takes_two_machines(
    cluster: Any, tmp_path: Path
) -> None:
    folder = prepared(tmp_path, "time.sleep(0.5)")
    axes = ("engine=ddp", "processes=1", "optimizer.lr=0.1,0.2", "nodes=1,2", "--output=ray")
    rows, said = compared(folder, cluster.address, *axes)
    assert [row["status"] for row in rows] == ["completed"] * 4
    order = re.findall(r"^cell (\d)/4 .*?(: completed|$)", said, re.MULTILINE)
    assert [number for number, ended in order[:2]] == ["1", "2"], said
    assert not any(ended for _, ended in order[:2]), "the second began before the first had ended"
    here, _ = compared(folder, None, "engine=ddp", "processes=1", "optimizer.lr=0.1,0.2", "--output=here")
    assert [row["losses"] for row in rows[::2]] == [row["losses"] for row in here]
    assert rows[1]["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5), "on two machines"
    assert rows[1]["runs"][0]["foreign_share"] is None, "the machine that coordinates says nothing of those"
    _, said = compared(folder, cluster.address, *axes)
    assert said.count("there already") == 4


@pytest.mark.slow
def test_a_cell_whose_worker_is_killed_is_run_again(cluster: Any, tmp_path: Path) -> None:
    folder = prepared(tmp_path, WAITS)
    (folder / "todo").touch()
    process = started(folder, cluster.address, "optimizer.lr=0.1,0.2", "--output=ray")
    try:
        cell = running(process, folder / "ray", 2)[0]
        (folder / "todo").unlink()
        worker = cell.parent()
        assert worker is not None
        worker.kill()
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert said.count("its machine was lost") == 1
    assert said.count("completed") == 2
    assert not cell.is_running(), "it ends with its worker"


@pytest.mark.slow
def test_an_interrupted_comparison_leaves_no_process_and_goes_on_with_what_is_left(
    cluster: Any, tmp_path: Path
) -> None:
    folder = prepared(tmp_path, f"if x.shape[0] == 4: {WAITS}")
    (folder / "todo").touch()
    words = ("batch_size=8,4", "--output=ray")
    process = started(folder, cluster.address, *words)
    try:
        cells = running(process, folder / "ray", 2)
        while not list(folder.glob("ray/cells/8-*/outcome.json")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "the same command goes on" in said
    psutil.wait_procs(cells, timeout=10)
    assert not any(cell.is_running() for cell in cells)
    (folder / "todo").unlink()
    rows, said = compared(folder, cluster.address, *words)
    assert said.count("there already") == 1
    assert [row["status"] for row in rows] == ["completed"] * 2


@pytest.mark.slow
def test_a_cell_larger_than_any_machine_is_a_row_and_one_without_its_number_is_refused(
    cluster: Any, tmp_path: Path
) -> None:
    folder = prepared(tmp_path)
    rows, _ = compared(folder, cluster.address, "engine=ddp", "processes=1,2", "--output=ray")
    assert [row["status"] for row in rows] == ["completed", "refused"]
    assert "takes 2 CPU of a machine, and no machine of the Ray cluster has more than 1 CPU" in rows[1]["reason"]
    line = command("compare", "run.yaml", "device=cpu", "engine=ddp,fsdp", "--ray", cluster.address)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "Ray has to know how many devices each cell holds" in " ".join(done.stderr.split())


def losses(folder: Path, row: dict[str, Any]) -> list[float]:
    [run] = row["runs"]
    events = folder / run["folder"] / "events.jsonl"
    if not events.exists():
        return []
    return [each["loss"] for each in read_events(events) if each["event"] == "step"]


def running(process: subprocess.Popen[str], output: Path, many: int) -> list[psutil.Process]:
    """Waits until so many cells have started, and returns their processes."""
    deadline = time.monotonic() + 120
    while len(found := [each for each in output.glob("cells/*/pid") if each.read_text()]) < many:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return [psutil.Process(int(each.read_text())) for each in found]
