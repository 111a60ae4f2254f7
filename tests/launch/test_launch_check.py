"""`drivetrain launch --check`: what is launched would start and fit, for every way to launch; else the reasons come."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.test_start import prepared

Call = Callable[..., tuple[int, str, str]]
PODS = ("--image", "example/drivetrain", "--volume")
WAYS = ("--local", "--torchrun", "--slurm", "--kubernetes", "--jobset")
DDP = ("engine=ddp", "processes=2", "device=cpu")


def launched(
    folder: Path, drivetrain: Call, way: str, *more: str, workload: str | None = None, check: bool = True
) -> tuple[int, str, str]:
    if not (folder / "run.yaml").exists():
        prepared(folder)
    pods = (*PODS, f"work:{folder}") if way in ("--kubernetes", "--jobset") else ()
    paths = (f"output={folder / 'run'}", f"workload.path={workload or folder / 'workload.py'}")
    return drivetrain("launch", way, *(["--check"] if check else []), str(folder / "run.yaml"), *paths, *more, *pods)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_would_start_is_launched_and_one_whose_data_fail_is_not(
    way: str, tmp_path: Path, drivetrain: Call
) -> None:
    code, text, errors = launched(tmp_path, drivetrain, way, *DDP)
    assert code == 0, errors
    assert "drivetrain" in text
    assert "checked: nothing would be refused" in " ".join(errors.split())
    workload = tmp_path / "workload.py"
    workload.write_text(workload.read_text() + "\nraise RuntimeError('no such table')\n")
    code, text, errors = launched(tmp_path, drivetrain, way, *DDP, "tracking.trackers=[none]")
    assert code == 2
    assert not text, "nothing is launched"
    assert "no such table" in errors
    assert "there is no tracker 'none'" in errors, "all reasons at once"


def test_without_the_check_a_note_says_that_the_run_will_be_refused(tmp_path: Path, drivetrain: Call) -> None:
    model = "{tokenizer: bytes, config: {model_type: llama}}"
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "run.yaml").write_text(
        f"workload: {{type: language_model, model: {model}, data: {{train: {tmp_path}/empty.txt, length: 32}}}}\n"
        "batch_size: 8\nloop: {steps: 4}\noptimizer: {name: adamw, lr: 0.1}\n"
    )
    code, text, errors = drivetrain("launch", "--slurm", str(tmp_path / "run.yaml"), *DDP, f"output={tmp_path}/run")
    assert code == 0, errors
    assert "#SBATCH" in text
    assert "the run will be refused: workload.data.train" in " ".join(errors.split())


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_does_not_fit_by_the_plan_is_not_launched(
    way: str, tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.plan.rows.Row.fits", property(lambda _: "no"))
    machine = () if way == "--local" else ("--machine", "2xA100-80GB")
    code, text, errors = launched(tmp_path, drivetrain, way, "engine=ddp", "processes=2", *machine)
    assert code == 2, errors
    assert not text
    assert "the run does not fit on" in errors


def test_the_folder_of_an_earlier_run_stops_a_job_that_works_in_it_and_no_pod(tmp_path: Path, drivetrain: Call) -> None:
    prepared(tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "run.yaml").write_text("name: run\n")
    (tmp_path / "run" / "events.jsonl").write_text("")
    codes = {way: launched(tmp_path, drivetrain, way, *DDP)[0] for way in WAYS}
    assert codes == {"--local": 2, "--torchrun": 2, "--slurm": 2, "--kubernetes": 0, "--jobset": 0}


def test_data_that_only_the_cluster_has_are_a_notice(tmp_path: Path, drivetrain: Call) -> None:
    code, text, errors = launched(tmp_path, drivetrain, "--slurm", *DDP, workload="/of/the/cluster.py")
    assert code == 0, errors
    assert "#SBATCH" in text
    assert "not checked: data and model; workload.path is not on this machine" in " ".join(errors.split())


def test_on_this_machine_all_files_have_to_be_there(tmp_path: Path, drivetrain: Call) -> None:
    code, text, errors = launched(tmp_path, drivetrain, "--local", *DDP, workload="/not/here.py", check=False)
    assert (code, text) == (2, "")
    assert "/not/here.py" in errors
    assert "the cluster" not in errors


@pytest.mark.parametrize("way", ["--local", "--slurm"])
def test_code_that_a_runs_folder_names_is_launched_only_if_it_is_trusted(
    way: str, tmp_path: Path, drivetrain: Call
) -> None:
    prepared(tmp_path)
    ran = tmp_path / "ran"
    workload = tmp_path / "workload.py"
    workload.write_text(f"open({str(ran)!r}, 'w').close()\n{workload.read_text()}")
    (tmp_path / "events.jsonl").write_text("")  # the mark of a run's folder
    code, text, errors = launched(tmp_path, drivetrain, way, *DDP, check=False)
    assert (code, text) == (2, ""), errors
    assert "--trust" in errors
    assert not ran.exists()
    code, _, errors = launched(tmp_path, drivetrain, way, *DDP, "--trust", check=False)
    assert code == 0, errors


def test_the_printed_commands_start_the_run(tmp_path: Path, drivetrain: Call) -> None:
    _, local, _ = launched(tmp_path, drivetrain, "--local", *DDP)
    assert shlex.split(local)[:3] == ["drivetrain", "train", str(tmp_path / "run.yaml")]
    _, line, _ = launched(tmp_path, drivetrain, "--torchrun", *DDP)
    assert shlex.split(line)[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "drivetrain"]
    _, line, _ = launched(tmp_path, drivetrain, "--torchrun", *DDP, "--nodes", "2", check=False)
    assert line.startswith(
        'torchrun --nproc-per-node 2 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "$FIRST:29500" -m'
    )
    code, line, errors = launched(tmp_path, drivetrain, "--local", *DDP, "--nodes", "2", check=False)
    assert (code, line) == (2, "")
    assert "--nodes: 2 was given" in errors


@pytest.mark.slow
def test_torchruns_command_trains(tmp_path: Path, drivetrain: Call) -> None:
    _, line, errors = launched(tmp_path, drivetrain, "--torchrun", *DDP)
    command = line.replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, errors + done.stderr
    assert (tmp_path / "run" / "report.json").is_file()
