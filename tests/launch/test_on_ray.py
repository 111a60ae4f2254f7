"""Ranks on a Ray cluster of two nodes on this machine: the bits of torch elastic, also after a kill or a lost node."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.checkpoint.directory import steps
from drivetrain.tracking.jsonl import read_events
from tests.launch.chaos import same_end
from tests.launch.ray_cluster import SIZE, three_nodes
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
        lost = next(node for node in cluster.spares if _ranks_on(node))
        cluster.spares.remove(lost)
        cluster.remove_node(lost, allow_graceful=False)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        found = trained(folder, "ray", "processes=1", "--nodes", "2", "--ray", cluster.address)
    finally:
        over.set()
        thread.join()
        cluster.spares.append(cluster.add_node(**SIZE))
    assert found == expected
    [why] = restarts(folder / "ray")
    assert "was lost with an actor or machine" in why


def _ranks_on(node: Any) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [each for each in raylet.children(recursive=True) if "drivetrain.launch.rank" in each.cmdline()]


DIGITS = Path(__file__).resolve().parents[2] / "recipes" / "digits.yaml"
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
SFT = {
    "workload": {
        "type": "language_model",
        "stage": "sft",
        "model": {"tokenizer": "bytes", "config": LLAMA},
        "data": {"train": "rows.jsonl", "template": "alpaca", "length": 128, "evaluation_fraction": 0.1},
    },
    "batch_size": 8,
    "loop": {"steps": 40, "max_grad_norm": 1.0},
    "optimizer": {"name": "adamw", "lr": 0.003},
    "evaluation": {"every_steps": 20},
}


@contextmanager
def lost_on_the_way(cluster: Any, run: Path) -> Iterator[list[str]]:
    """Kills a rank at its sixth step, and after the restart removes a node. Yields what was done."""
    done: list[str] = []
    over = threading.Event()

    def seen(starts: int, step: int) -> bool:
        events = list(read_events(run / "events.jsonl")) if (run / "events.jsonl").exists() else []
        begun = [place for place, event in enumerate(events) if event["event"] == "run_started"]
        return len(begun) >= starts and any(
            event["event"] == "step" and event["step"] >= step for event in events[begun[starts - 1] :]
        )

    def wait(condition: Callable[[], bool]) -> bool:
        while not over.wait(0.02):
            if condition():
                return True
        return False

    def work() -> None:
        if wait(lambda: seen(1, 6)):
            next(rank for node in cluster.spares for rank in _ranks_on(node)).kill()
            done.append("killed")
        if wait(lambda: seen(2, 12)):
            lost = next(node for node in cluster.spares if _ranks_on(node))
            cluster.spares.remove(lost)
            cluster.remove_node(lost, allow_graceful=False)
            done.append("removed")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
        while len(cluster.spares) < 2:
            cluster.spares.append(cluster.add_node(**SIZE))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), [("digits", "ddp"), ("sft", "fsdp")])
def test_a_run_that_loses_a_rank_and_then_a_node_has_curve_and_bits_of_torch_elastic(
    cluster: Any, tmp_path: Path, name: str, engine: str
) -> None:
    pairs = [("add", 3, 4), ("take", 9, 2), ("say", 1, 7)]
    rows = [
        {"instruction": f"{verb} {one} {other}", "output": f"{one * other} {verb}"} for verb, one, other in pairs * 30
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sft.yaml").write_text(json.dumps(SFT))
    file = str(DIGITS) if name == "digits" else "sft.yaml"
    words = (file, f"engine={engine}", "device=cpu", "checkpoints.every_steps=4", "tracking.log_every=1", "-q")
    if name == "digits":
        words += ("loop={steps: 40}", "evaluation.every_steps=20")
    for output, place in (
        ("elastic", ("processes=2",)),
        ("ray", ("processes=1", "--nodes", "2", "--ray", cluster.address, "max_restarts=3")),
    ):
        with lost_on_the_way(cluster, tmp_path / "ray") as lost:
            line = command("train", *words, f"output={output}", *place)
            ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert lost == ["killed", "removed"]
    assert len(restarts(tmp_path / "ray")) == 2
    same_end(tmp_path / "elastic", tmp_path / "ray")


def test_a_run_that_cannot_start_there_is_refused_before_any_rank(cluster: Any, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    line = command("train", "run.yaml", "engine=ddp", "device=cpu", "--ray", cluster.address)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "processes: was left out: Ray has to know" in " ".join(done.stderr.split())
    assert not (folder / "runs").exists()
