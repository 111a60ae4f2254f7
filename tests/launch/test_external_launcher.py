"""Runs that another launcher starts: torchrun and `accelerate launch`, as a module and as the installed script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drivetrain import __version__
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.rules import check
from drivetrain.launch.external_launcher import OuterLauncher
from drivetrain.launch.group import own_gpu
from tests.launch.test_start import finished_here, losses, prepared, report

SCRIPTS = Path(sys.executable).parent
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]
# on a machine without GPUs too: its ranks are torchrun's, and take whatever device there is
# the second rank comes when the first one has long begun
LATE = ["--no-python", "bash", "-c", '[ "$RANK" = 1 ] && sleep 4; exec drivetrain "$@"', "late"]
ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepared(tmp_path_factory.mktemp("launched"))
    finished_here(folder, "train", "run.yaml", "output=one")
    return folder


def launched(folder: Path, launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    if not (SCRIPTS / launcher[0]).exists():
        pytest.skip(f"{launcher[0]} is not installed")
    command = [str(SCRIPTS / launcher[0]), *launcher[1:], *arguments]
    path = os.environ | {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}"}
    return subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        (TORCHRUN, LATE),
        pytest.param(TORCHRUN, ["-m", "drivetrain"], marks=pytest.mark.slow),
        pytest.param(TORCHRUN, ["--no-python", "drivetrain"], marks=pytest.mark.slow),
        pytest.param(ACCELERATE, ["-m", "drivetrain"], marks=pytest.mark.slow),
        pytest.param(ACCELERATE, ["--no_python", "drivetrain"], marks=pytest.mark.slow),
    ],
    ids=["torchrun-late", "torchrun", "torchrun-script", "accelerate", "accelerate-script"],
)
def test_the_ranks_of_an_outer_launcher_are_joined(
    place: Path, launcher: list[str], how: list[str], request: pytest.FixtureRequest
) -> None:
    output = request.node.callspec.id
    done = launched(place, launcher, *how, "train", "run.yaml", "engine=ddp", f"output={output}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("completed") == 1, "one report"
    assert losses(place / output) == pytest.approx(losses(place / "one"), rel=1e-5)
    assert report(place / output)["engaged"]["world_size"] == 2


def test_the_one_process_that_accelerate_starts_for_several_is_no_run(place: Path) -> None:
    """`--cpu` sets no ranks up: silently every one of the processes asked for but one would be missing."""
    cpu = ["accelerate", "launch", "--cpu", "--num_processes", "2"]
    done = launched(place, cpu, "-m", "drivetrain", "train", "run.yaml", "engine=ddp", "output=refused")
    assert done.returncode != 0
    assert "processes: accelerate launch was told of several, and has started one" in " ".join(done.stderr.split())
    assert not (place / "refused").exists()


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.chdir(place)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "settings", "words"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, ["engine=ddp"], "precision: fp32 is the run's"),
        ({"ACCELERATE_USE_FSDP": "true"}, ["engine=ddp"], "engine: ddp is the run's, but accelerate launch got"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, ["engine=accelerate-fsdp"], "engine: accelerate-fsdp is the run's"),
    ],
)
def test_options_of_accelerate_launch_that_the_run_contradicts_are_refused(
    here: pytest.MonkeyPatch, drivetrain: Cli, variables: dict[str, str], settings: list[str], words: str
) -> None:
    for name, value in variables.items():
        here.setenv(name, value)
    code, _, described = drivetrain("train", "run.yaml", *settings, "processes=1", "output=refused")
    assert (code, words in described) == (2, True), described


def test_a_restart_by_torchrun_does_not_overwrite_what_the_first_start_saved(
    here: pytest.MonkeyPatch, drivetrain: Cli, place: Path
) -> None:
    reported = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**reported, "MASTER_PORT": "29511", "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        here.setenv(name, value)
    command = ("train", "run.yaml", "output=again", "--quiet")
    assert drivetrain(*command, "--overwrite")[0] == 0
    saved = sorted((place / "again" / "checkpoints").iterdir())
    here.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    code, _, described = drivetrain(*command, "--overwrite")
    assert (code, "restart 1" in described, "give --resume" in described) == (2, True, True), described
    assert sorted((place / "again" / "checkpoints").iterdir()) == saved
    assert drivetrain(*command, "--resume", "loop.steps=14")[0] == 0


def test_options_of_accelerate_launch_that_the_run_has_too_are_no_problem(
    here: pytest.MonkeyPatch, drivetrain: Cli
) -> None:
    reported = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "True"}
    for name, value in {**reported, "MASTER_ADDR": "127.0.0.1"}.items():
        here.setenv(name, value)
    settings = ("engine=fsdp", "precision=bf16-mixed", "processes=1", "loop.steps=2", "--quiet")
    code, _, described = drivetrain("train", "run.yaml", *settings, "output=agreeing")
    assert code == 0, described


@pytest.mark.parametrize(("world_size", "expected"), [("1", -signal.SIGABRT), ("2", 0)])
def test_a_rank_of_another_launcher_ends_before_threads_of_its_process_group_can_abort_it(
    world_size: str, expected: int
) -> None:
    reported = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": world_size, "WORLD_SIZE": world_size}
    program = (
        "import atexit, os, torch.distributed; from drivetrain.cli import main; "
        "atexit.register(os.abort); main(['version'])"
    )
    environment = os.environ | reported | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (expected, f"{__version__}\n"), done.stderr


@pytest.mark.parametrize(("seen", "expected"), [(1, 0), (4, 2)])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_it_sees(
    seen: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun --gpus-per-task=1` shows each process one, which is number 0 there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert own_gpu() == expected


@pytest.mark.parametrize(("seen", "refused"), [(1, False), (4, False), (2, True)])
def test_processes_that_each_see_one_gpu_have_one_each(seen: int, refused: bool) -> None:
    gpu = Machine("cuda", "a GPU", seen, 2**34, 4, (9, 0), frozenset({"float32"}))
    raw = {"workload": {"type": "module", "path": "x.py"}, "batch_size": 8, "loop": {"steps": 9}, "engine": "ddp"}
    run, _ = validate(raw, [])
    assert run is not None
    outer = OuterLauncher(rank=2, world_size=4, processes=4)
    fitted, _ = outer.fitted(run)
    problems = [each for each in check(fitted, outer.machine(gpu)) if each.field == "processes"]
    assert bool(problems) is refused
