"""The task for SkyPilot: its script trains on every node, and what would lose a run is refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.launch.test_slurm import fake
from tests.launch.test_start import prepared

Call = Callable[..., tuple[int, str, str]]
GIVEN = ("--image", "registry/drivetrain:1", "--accelerator", "H100", "--memory", "200Gi", "--cpus", "64")


@pytest.fixture
def task(tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)

    def made(*words: str) -> Any:
        code, text, reported = drivetrain("launch", "--skypilot", "run.yaml", "engine=ddp", "processes=2", *words)
        assert code == 0, reported
        return YAML(typ="safe").load(text)

    return made


def test_the_task_asks_for_the_runs_nodes_and_devices(task: Callable[..., Any]) -> None:
    found = task(*GIVEN, "--nodes", "2", "--volume", "runs:/runs", "output=/runs/x", "--restarts", "3")
    assert found["num_nodes"] == 2
    assert found["volumes"] == {"/runs": "runs"}
    assert found["resources"] == {
        "image_id": "docker:registry/drivetrain:1",
        "accelerators": "H100:2",
        "cpus": "64+",
        "memory": "200+",
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [143]},
    }


def test_its_script_starts_every_node_with_the_first_ones_address(task: Callable[..., Any], tmp_path: Path) -> None:
    script = task(*GIVEN, "--nodes", "2", "--volume", "runs:/runs", "output=/runs/my run")["run"]
    fake(tmp_path, "drivetrain", f'printf "%s\\n" "$@" > {tmp_path}/words')
    where = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    subprocess.run(["bash", "-c", script], env={**where, "SKYPILOT_NODE_RANK": "1"}, check=True, timeout=60)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:2] == ["train", "run.yaml"]
    assert "output=/runs/my run" in words
    assert words[-5:] == ["--resume", "--node-rank", "1", "--rendezvous", "10.0.0.1:29500"]


def test_a_single_node_needs_only_a_mirror(task: Callable[..., Any]) -> None:
    found = task(*GIVEN, "mirror=s3://bucket/runs/x")
    assert "volumes" not in found
    assert found["run"].endswith("mirror=s3://bucket/runs/x --resume\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([*GIVEN], "mirror: the run's folder runs/run would be lost with its machine"),
        ([*GIVEN, "--nodes", "2", "mirror=s3://bucket/x"], "output: the run's folder runs/run lies in no volume"),
        ([*GIVEN, "--volume", "runs"], "--volume: 'runs' is no NAME:/place"),
        (["--accelerator", "H100", "mirror=s3://bucket/x"], "--image: was not given"),
        (["--image", "i", "mirror=s3://bucket/x"], "--accelerator: was not given"),
        (
            ["H100:8" if each == "H100" else each for each in (*GIVEN, "mirror=s3://b/x")],
            "--accelerator: 'H100:8' is no name of a GPU",
        ),
        ([*GIVEN, "--queue", "q", "--time", "1:00:00"], "--queue: has no effect with --skypilot"),
    ],
)
def test_what_would_lose_the_run_is_refused(
    given: list[str], words: str, tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, text, reported = drivetrain("launch", "--skypilot", "run.yaml", "engine=ddp", "processes=2", *given)
    assert (code, text) == (2, "")
    assert words in " ".join(reported.split())


@pytest.mark.parametrize(
    ("name", "note"),
    [
        (
            "H1000",
            "--accelerator H1000 is not known here: did you mean H100? `sky show-gpus` lists what SkyPilot takes",
        ),
        ("tpu-v5litepod-8", "--accelerator tpu-v5litepod-8 is not known here; `sky show-gpus`"),
        ("RTX4090", None),
        ("A100-80GB", None),
    ],
)
def test_a_gpu_that_the_catalogue_lacks_is_a_note_since_skypilot_may_know_it(
    name: str, note: str | None, tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ("--image", "i", "--accelerator", name, "mirror=s3://bucket/x")
    code, text, reported = drivetrain("launch", "--skypilot", "run.yaml", "engine=ddp", "processes=2", *given)
    assert code == 0, reported
    assert f"accelerators: {name}:2" in text
    assert ("is not known here" in reported) == (note is not None)
    assert note is None or note in reported


def test_skypilot_accepts_the_task(task: Callable[..., Any]) -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    found = task(*GIVEN, "--nodes", "2", "--volume", "runs:/runs", "output=/runs/x")
    jsonschema.validate(found, schemas.get_task_schema())
    jsonschema.validate(found["resources"], schemas.get_resources_schema())
