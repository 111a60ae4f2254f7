"""The batch script: bash accepts it, and its command line trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.launch.slurm import slurm_memory
from drivetrain.launch.slurm_time import seconds_of, slurm_time
from tests.launch.test_start import free_port, prepared

Call = Callable[..., tuple[int, str, str]]


def fake(folder: Path, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["called", "trained"])
def test_the_script_passes_bash_and_its_command_line_runs_on_every_node(
    trains: bool, tmp_path: Path, drivetrain: Call
) -> None:
    prepared(tmp_path)
    code, script, _ = drivetrain(
        "launch", "--slurm", str(tmp_path / "run.yaml"), "engine=ddp", "processes=1", "device=cpu",
        f"output={tmp_path / 'run'}", f"workload.path={tmp_path / 'workload.py'}", "--nodes", "2", "--time", "01:00:00",
    )  # fmt: skip
    assert code == 0
    job = tmp_path / "job.sbatch"
    port = free_port()
    job.write_text(script.replace(":29500", f":{port}"))
    assert subprocess.run(["bash", "-n", str(job)], check=False).returncode == 0
    assert "#SBATCH --nodes=2" in script
    assert "#SBATCH --time=01:00:00" in script
    assert "gpus" not in script, "device=cpu asks for none"
    # Slurm as far as the script sees it: srun starts the command on each node
    programs = tmp_path / "bin"
    programs.mkdir()
    fake(programs, "scontrol", "echo 127.0.0.1")
    fake(
        programs,
        "srun",
        'for n in 0 1; do SLURM_NODEID=$n "$@" & pids="$pids $!"; done; for p in $pids; do wait $p || exit 1; done',
    )
    calls = tmp_path / "calls"
    called = f'exec {sys.executable} -m drivetrain "$@"' if trains else f'echo "$@" >> {calls}'
    fake(programs, "drivetrain", called)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[0-1]"}
    done = subprocess.run(["bash", str(job)], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    if trains:
        assert json.loads((tmp_path / "run" / "report.json").read_text())["engaged"]["world_size"] == 2
        return
    [first, second] = sorted(calls.read_text().splitlines(), key=lambda line: line[line.index("--node-rank") :])
    assert first == second.replace("--node-rank 1", "--node-rank 0")
    assert first.startswith(f"train {tmp_path / 'run.yaml'} ")
    assert first.endswith(f" --node-rank 0 --rendezvous 127.0.0.1:{port}"), "as two nodes that meet are started"
    assert {"engine=ddp", "processes=1", "nodes=2", f"output={tmp_path / 'run'}"} <= set(first.split())


def test_a_job_that_saved_when_its_time_was_up_is_queued_again_and_goes_on(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job as Slurm starts it, with a run that only says how it was called, and the exit code it is told to have."""
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, script, _ = drivetrain("launch", "--slurm", str(tmp_path / "run.yaml"), "grace_seconds=90")
    assert code == 0
    assert "#SBATCH --signal=TERM@90\n" in script, "the grace that Slurm gives is the one that the ranks get"
    assert "#SBATCH --requeue\n" in script, "also when a node fails"
    programs = tmp_path / "bin"
    programs.mkdir()
    fake(programs, "scontrol", 'echo "scontrol $@" >> "$CALLS"')
    fake(programs, "srun", 'exec "$@"')
    fake(programs, "drivetrain", 'echo "drivetrain $@" >> "$CALLS"; exit $CODE')
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n0", "SLURM_JOB_ID": "77"}

    def job(number: int, exit_code: int) -> str:
        calls = tmp_path / f"calls-{number}-{exit_code}"
        words = {"CALLS": str(calls), "CODE": str(exit_code), "SLURM_RESTART_COUNT": str(number)}
        done = subprocess.run(["bash", "-c", script], env={**os.environ, **path, **words}, timeout=60, check=False)
        assert done.returncode == exit_code
        return calls.read_text()

    first, second = job(0, 143), job(1, 143)
    assert "scontrol requeue 77" in first
    assert "scontrol requeue 77" in second
    assert "--resume" not in first
    assert f"drivetrain train {tmp_path / 'run.yaml'} grace_seconds=90 --resume\n" in second
    for done in (0, 1, 2):
        assert "requeue" not in job(1, done)


def test_gpus_and_cores_are_asked_for(tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, script, _ = drivetrain(
        "launch", "--slurm", str(tmp_path / "run.yaml"), "engine=fsdp", "processes=8",
        "--partition", "long", "--cpus", "64",
    )  # fmt: skip
    assert code == 0
    for line in (
        "--gpus-per-node=8",
        "--partition=long",
        "--cpus-per-task=64",
        "--nodes=1",
        "--signal=TERM@300",
        "--requeue",
    ):
        assert f"#SBATCH {line}" in script
    assert "--node-rank" not in script, "one node needs no meeting place"


def test_a_run_file_that_is_wrong_is_reported_before_a_job_waits_in_a_queue(tmp_path: Path, drivetrain: Call) -> None:
    prepared(tmp_path)
    code, _, reported = drivetrain("launch", "--slurm", str(tmp_path / "run.yaml"), "optimiser.lr=1")
    assert code == 2
    assert "optimizer.lr" in reported


def test_what_no_gpu_could_run_is_refused_before_a_script_is_written(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_file = str(tmp_path / "run.yaml")
    code, script, reported = drivetrain(
        "launch", "--slurm", run_file, "engine=mesh", "engine.tp=3", "processes=8", "precision=bf16-master"
    )
    assert (code, script) == (2, "")
    assert "2 problems" in reported
    assert "engine=mesh-tp3 has no bf16-master" in reported
    assert "world size (8) is no multiple of tp (3)" in reported
    code, _, reported = drivetrain("launch", "--slurm", run_file, "engine=ddp", "processes=16", "batch_size=4")
    assert code == 2
    assert "the batch (4) < the devices that share it (16)" in reported


def test_a_path_that_may_exist_on_the_cluster_alone_is_a_note(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, script, reported = drivetrain("launch", "--slurm", "run.yaml", "workload.path=/scratch/mine.py")
    assert code == 0
    assert script.startswith("#!/bin/bash")
    assert "/scratch/mine.py does not exist here; the cluster has to have it" in reported
    code, script, reported = drivetrain("launch", "--slurm", "run.yaml", "workload.path=mine.py")
    assert (code, script) == (2, ""), "the job starts in this folder"
    assert "mine.py does not exist" in reported


def test_the_size_of_the_job_is_reported_beside_the_script(tmp_path: Path, drivetrain: Call) -> None:
    prepared(tmp_path)
    given = ["launch", "--slurm", str(tmp_path / "run.yaml"), f"workload.path={tmp_path / 'workload.py'}"]
    _, script, reported = drivetrain(*given, "engine=fsdp", "processes=16", "batch_size=64", "--nodes", "2")
    assert "2 nodes x 16 processes = 32 GPUs; 2 samples each of the global batch of 64" in reported
    assert "16 processes" not in script
    _, _, reported = drivetrain(*given, "engine=mesh", "engine.tp=2", "processes=4", "batch_size=5")
    assert "1 node x 4 processes = 4 GPUs; 2 to 3 samples for each of 2 data ranks of the global batch of 5" in reported
    _, _, reported = drivetrain(*given, "engine=ddp")
    assert "processes was left out" in reported
    code, script, reported = drivetrain(*given, "engine=fsdp", "engine.hybrid=8", "--nodes", "2")
    assert (code, "processes was left out" in reported) == (0, True), reported
    _, script, reported = drivetrain(*given, "engine=single")
    assert "1 node x 1 process = 1 GPU" in reported
    assert "--gpus-per-node=1" in script


def test_a_package_that_only_the_cluster_has_is_a_note(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.setattr("drivetrain.launch.cluster.installed", frozenset)
    given = ["launch", "--slurm", str(tmp_path / "run.yaml"), f"workload.path={tmp_path / 'workload.py'}"]
    code, _, reported = drivetrain(*given, "engine=zero2", "processes=2")
    assert code == 0
    assert "needs deepspeed, which is not installed here; the cluster has to have it" in reported


def test_srun_gets_the_cores_that_the_job_asks_for(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ["launch", "--slurm", "run.yaml", "engine=ddp", "processes=2", "name=my run"]
    _, script, reported = drivetrain(*given, "--cpus", "64", "--memory", "200Gi")
    assert script.index("export SRUN_CPUS_PER_TASK=64\n") < script.index("srun bash")
    assert "#SBATCH --mem=200G\n" in script
    assert "#SBATCH --job-name='my run'\n" in script
    assert "--cpus was left out" not in reported
    _, script, reported = drivetrain(*given)
    assert "SRUN_CPUS_PER_TASK" not in script
    assert "--cpus was left out: Slurm may give a node's ranks a single core" in " ".join(reported.split())


def test_a_container_gets_the_jobs_folder_and_what_is_mounted(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyxis gives these options to srun; the rest of the script is as without a container."""
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ["launch", "--slurm", "run.yaml", "engine=ddp", "processes=2", "--cpus", "8"]
    _, plain, _ = drivetrain(*given)
    code, script, reported = drivetrain(*given, "--image", "nvcr.io#nvidia/x:1", "--mount", "/my data:/data:ro")
    assert code == 0, reported
    job = tmp_path / "job.sbatch"
    job.write_text(script)
    assert subprocess.run(["bash", "-n", str(job)], check=False).returncode == 0
    programs = tmp_path / "bin"
    programs.mkdir()
    fake(programs, "scontrol", "echo first")
    fake(programs, "srun", f'printf "%s\\n" "$@" > {tmp_path / "words"}')
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n0"}
    subprocess.run(["bash", str(job)], env=environment, check=True, timeout=60)
    image, mounts, folder, *command = (tmp_path / "words").read_text().splitlines()
    assert image == "--container-image=nvcr.io#nvidia/x:1"
    assert mounts == f"--container-mounts={tmp_path}:{tmp_path},/my data:/data:ro"
    assert folder == f"--container-workdir={tmp_path}"
    assert command[:2] == ["bash", "-c"]
    options = script[script.index("--container-image") : script.index("bash -c")]
    assert script.replace(options, "") == plain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--mount", "/a:/b"], "--mount: was given without --image"),
        (["--image", "x", "--mount", "data:/b"], "--mount: 'data:/b' is no SRC:DST of two absolute paths"),
        (["--image", "x", "output=/elsewhere/run"], "output: the run's folder /elsewhere/run lies in no mount"),
    ],
)
def test_a_container_that_would_lose_the_run_is_refused(
    given: list[str], words: str, tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, script, reported = drivetrain("launch", "--slurm", "run.yaml", "engine=ddp", "processes=2", *given)
    assert (code, script) == (2, "")
    assert words in " ".join(reported.split())


@pytest.mark.parametrize(
    ("text", "slurm"), [("200Gi", "200G"), ("1.5Gi", "1536M"), ("2Ti", "2048G"), ("64G", "61036M"), ("1048576", "1M")]
)
def test_memory_is_written_in_slurms_units(text: str, slurm: str) -> None:
    assert slurm_memory(text) == slurm


@pytest.mark.parametrize(
    ("text", "slurm"),
    [
        *((own, own) for own in ("30", "30:15", "12:00:00", "1-12", "1-12:30", "1-12:30:15", "0", "UNLIMITED")),
        ("12h", "12:00:00"),
        ("90m", "01:30:00"),
        ("2d", "2-00:00:00"),
        ("1d12h", "1-12:00:00"),
        ("1w", "7-00:00:00"),
        ("36H", "1-12:00:00"),
        (" 1 day 12 hours ", "1-12:00:00"),
        ("45min", "00:45:00"),
        ("1h30m10s", "01:30:10"),
    ],
)
def test_a_time_limit_is_written_as_slurm_takes_it(text: str, slurm: str) -> None:
    assert slurm_time(text) == slurm


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30", 30 * 60),
        ("30:15", 30 * 60 + 15),
        ("12:00:00", 12 * 3600),
        ("1-12", 36 * 3600),
        ("1-12:30", 36 * 3600 + 30 * 60),
        ("1-12:30:15", 36 * 3600 + 30 * 60 + 15),
        ("0", None),
        ("UNLIMITED", None),
    ],
)
def test_a_limit_lasts_as_long_as_slurm_counts(limit: str, seconds: int | None) -> None:
    """By the formats in sbatch's manual: a number alone is minutes, and behind days hours come first."""
    assert seconds_of(limit) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "12x", "1.5h", "h", "12h1d", "1:2:3:4", "1-", "-1", "1d-12", "0h", "٣h", "9" * 10]
)
def test_what_slurm_would_refuse_or_misread_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError) as refused:
        slurm_time(text)
    [found] = refused.value.problems
    assert found.field == "--time"
    assert "1d12h" in found.fix
    assert "1-12:00:00" in found.fix


def test_the_script_has_the_limit_converted_and_wrong_amounts_are_refused_together(
    tmp_path: Path, drivetrain: Call
) -> None:
    prepared(tmp_path)
    given = (
        "launch",
        "--slurm",
        str(tmp_path / "run.yaml"),
        "engine=ddp",
        "processes=2",
        f"workload.path={tmp_path / 'workload.py'}",
    )
    code, script, reported = drivetrain(*given, "--time", "1d12h")
    assert code == 0, reported
    assert "#SBATCH --time=1-12:00:00\n" in script
    code, script, reported = drivetrain(*given, "--time", "12")
    assert "#SBATCH --time=12\n" in script
    assert "--time 12 is 12 minutes, as Slurm counts: 12h is hours" in reported
    for text, words in (
        ("24:00", "--time 24:00 is 24 minutes, as Slurm counts: 24h is hours"),
        ("0", "--time 0 sets no limit, as Slurm counts"),
        ("5m", "--time 5m is no longer than the 300 s (grace_seconds) that a run has to save"),
    ):
        code, _, reported = drivetrain(*given, "--time", text)
        assert code == 0
        assert words in " ".join(reported.split())
    code, _, reported = drivetrain(*given, "--time", "6m")
    assert "grace_seconds" not in reported
    code, script, reported = drivetrain(*given, "--time", "1,5h", "--memory", "much", "--mount", "/a:/b")
    assert (code, script) == (2, "")
    for words in ("--time: '1,5h' is no time limit", "--memory: 'much'", "--mount: was given without --image"):
        assert words in reported


@pytest.mark.parametrize("text", ["much", "200GiB", "i", ""])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no amount of memory"):
        slurm_memory(text)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--slurm", "--volume", "a:/b", "--queue", "q", "--restarts", "3"], ["--volume", "--queue", "--restarts"]),
        (["--jobset", "--image", "i", "--volume", "a:/b", "--time", "01:00:00"], ["--time"]),
        (["--kubernetes", "--partition", "long", "--account", "mine"], ["--partition", "--account"]),
        (["--torchrun", "--cpus", "8", "--memory", "200Gi"], ["--cpus", "--memory"]),
        (["--ray", "--image", "i", "--mount", "/a:/b"], ["--image", "--mount"]),
        (["--validate", "--nodes", "2", "lr=1"], ["--nodes", "KEY=VALUE"]),
    ],
)
def test_options_that_have_no_effect_are_refused(
    given: list[str], named: list[str], tmp_path: Path, drivetrain: Call
) -> None:
    prepared(tmp_path)
    code, out, reported = drivetrain("launch", str(tmp_path / "run.yaml"), *given)
    assert (code, out) == (2, "")
    assert all(f"{name}: has no effect with" in reported for name in named), reported
    assert reported.count("has no effect with") == len(named)


def test_a_plan_for_the_cluster_has_as_many_nodes_as_the_run(
    tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ["launch", "--slurm", "run.yaml", "engine=ddp", "processes=4", "batch_size=16"]
    code, _, reported = drivetrain(*given, "--nodes", "2", "--machine", "4xH100-80GB")
    assert code == 0, reported
    assert "s a step" in reported
    for more, words in (
        (["--nodes", "4", "--machine", "2x4xH100-80GB"], "nodes: 4 were given, but the machine has 2 nodes"),
        (["--machine", "2xH100-80GB"], "processes: 4 were given, but a node of the machine has 2 devices"),
    ):
        code, script, reported = drivetrain(*given, *more)
        assert (code, script) == (2, "")
        assert words in " ".join(reported.split())


@pytest.mark.parametrize("of_texts", [True, False], ids=["texts can be made", "pictures cannot"])
def test_data_that_are_not_here_leave_a_plan_that_another_command_makes_without_them(
    of_texts: bool, tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    away = {"train": "/nowhere/data.csv" if of_texts else "/nowhere/data", "evaluation_fraction": 0.1}
    bert = {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2}
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good"]))
    if of_texts:
        workload = {"type": "text_classification", "model": {"tokenizer": "vocab.txt", "config": bert}, "data": away}
    else:
        data = {**away, "source": "folder"}
        workload = {"type": "image_classification", "model": {"config": {"model_type": "resnet"}}, "data": data}
    text = json.dumps({"workload": workload, "batch_size": 16, "loop": {"steps": 1}, "processes": 4, "engine": "ddp"})
    (tmp_path / "run.yaml").write_text(text)
    code, _, reported = drivetrain("launch", "--slurm", "run.yaml", "--machine", "4xH100-80GB")
    assert code == 0, reported
    assert "no plan" in reported
    made = "`drivetrain plan --machine 4xH100-80GB --samples N --length TOKENS` plans without the data"
    assert (made in reported) == of_texts
