"""Ranks on a Ray cluster of two nodes on this machine: the bits of torch elastic, also after a kill or a lost node."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint.directory import steps
from drivetrain.tracking.jsonl import read_events
from tests.launch.ray_cluster import three_nodes
from tests.launch.test_start import command, prepared

pytest.importorskip("ray", reason="drivetrain[ray] is not installed")
ONCE = """
            if os.environ.get("RANK") == "1" and Model.steps == 4 and os.path.exists("todo"):
                os.remove("todo")
                {}"""
WORDS = ("engine=ddp", "device=cpu", "max_restarts=2", "checkpoints.every_steps=2", "-q")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_nodes() as found:
        yield found


def trained(folder: Path, output: str, *words: str) -> bytes:
    """Returns the weights that a run ends with, as its file has them."""
    line = command("train", "run.yaml", *WORDS, f"output={output}", *words)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return (steps(folder / output / "checkpoints")[-1] / "model.safetensors").read_bytes()


def restarts(run: Path) -> list[str]:
    events = read_events(run / "events.jsonl")
    return [each["message"] for each in events if each["event"] == "warning" and each["message"].startswith("restart")]


@pytest.mark.slow
def test_a_killed_rank_goes_on_from_its_checkpoint_with_the_bits_of_torch_elastic(cluster: Any, tmp_path: Path) -> None:
    folder = prepared(tmp_path, f"pass{ONCE.format('os.kill(os.getpid(), 9)')}")
    expected = trained(folder, "elastic", "processes=2")
    (folder / "todo").touch()
    found = trained(folder, "ray", "processes=1", "--nodes", "2", "--ray", cluster.address)
    assert found == expected
    [why] = restarts(folder / "ray")
    assert "rank 1 was ended by SIGKILL" in why


@pytest.mark.slow
def test_a_lost_node_is_replaced_and_the_run_goes_on_with_the_same_bits(cluster: Any, tmp_path: Path) -> None:
    folder = prepared(tmp_path, f"pass{ONCE.format('time.sleep(600)')}")
    expected = trained(folder, "elastic", "processes=2")
    (folder / "todo").touch()
    over = threading.Event()

    def remove() -> None:
        while (folder / "todo").exists() and not over.wait(0.1):
            pass
        holds = [node for node in cluster.spares if _runs_rank_1(node)]
        cluster.remove_node(holds[0], allow_graceful=False)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        found = trained(folder, "ray", "processes=1", "--nodes", "2", "--ray", cluster.address)
    finally:
        over.set()
        thread.join()
    assert found == expected
    [why] = restarts(folder / "ray")
    assert "was lost with an actor or machine" in why


def _runs_rank_1(node: Any) -> bool:
    import psutil

    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return any("drivetrain.launch.rank" in each.cmdline() for each in raylet.children(recursive=True))


def test_a_run_that_cannot_start_there_is_refused_before_any_rank(cluster: Any, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    line = command("train", "run.yaml", "engine=ddp", "device=cpu", "--ray", cluster.address)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "processes: was left out: Ray has to know" in " ".join(done.stderr.split())
    assert not (folder / "runs").exists()
