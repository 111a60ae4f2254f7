"""Writes a batch script for Slurm: one task a node, each of which starts that node's ranks. A job that saved at its end
is put into the queue again."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError, counted, problem, together
from drivetrain.launch.slurm_time import seconds_of, slurm_time

PORT = 29500
MOUNT = re.compile(r"/[^:,]*:/[^:,]*(:[a-z+]+)?")  # pyxis takes flags after a second colon
SAVED = 143  # the run's exit code when SIGTERM ended it and it has saved


@dataclass(frozen=True)
class Allocation:
    """The resources that the job requests from Slurm."""

    time: str  # as Slurm writes it, or plainly: 1d12h
    partition: str | None = None
    account: str | None = None
    cpus: int | None = None  # of each node
    memory: str | None = None  # of each node, as Kubernetes writes it: 200Gi
    image: str | None = None  # of a container that pyxis makes
    mounts: Sequence[str] = ()  # SRC:DST of folders in it, beside the one that the job starts in

    def notices(self, run: RunConfig) -> list[str]:
        """Returns what Slurm does where an option was left out, or may mean something else than was meant."""
        found = []
        limit = slurm_time(self.time)
        seconds, short = seconds_of(limit), re.fullmatch(r"(\d+)(:\d+)?", limit)
        if seconds is None:
            found.append(f"--time {self.time} sets no limit, as Slurm counts")
        elif short:
            minutes = counted(int(short[1]), "minute")
            found.append(f"--time {self.time} is {minutes}, as Slurm counts: {short[1]}h is hours")
        if seconds is not None and seconds <= run.grace_seconds:
            why = (
                f"--time {self.time} is no longer than the {run.grace_seconds} s (grace_seconds) that a run has to save"
            )
            found.append(f"{why}: Slurm would end it as soon as it starts; give more")
        if self.cpus is None:
            why = (
                "--cpus was left out: Slurm may give a node's ranks a single core, which they share with their loaders"
            )
            found.append(f"{why}; give the cores of a node, as in --cpus 64")
        return found


def sbatch_script(run_file: Path, overrides: Sequence[str], run: RunConfig, allocation: Allocation) -> str:
    """Returns the script's text; processes and nodes are the run's. Raises UserError for a container in which the run
    would be lost."""
    _refuse(run, allocation)
    asked = {
        "job-name": run.name,
        "nodes": run.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": run.processes if run.device != "cpu" else None,
        "cpus-per-task": allocation.cpus,
        "mem": None if allocation.memory is None else slurm_memory(allocation.memory),
        "time": slurm_time(allocation.time),
        "partition": allocation.partition,
        "account": allocation.account,
        "signal": f"TERM@{run.grace_seconds}",  # before the end of the job
        "output": "%x-%j.log",
        "open-mode": "append",  # a job that starts again writes into the same log
    }
    lines = [f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in asked.items() if value is not None]
    lines.append("#SBATCH --requeue")  # also by Slurm itself, when a node fails or the job is preempted
    command = ["drivetrain", "train", str(run_file), *overrides]
    # since Slurm 22.05 srun does not take the cores of a task from the job
    cores = [] if allocation.cpus is None else [f"export SRUN_CPUS_PER_TASK={allocation.cpus}"]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            "set -euo pipefail",
            "# all nodes meet at the first one",
            'first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            f'export RENDEZVOUS="$first:{PORT}"',
            "# a job that was in the queue before goes on from its newest good checkpoint",
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then export RESUME=--resume; else export RESUME=; fi',
            *cores,
            "code=0",
            "# the rank differs from node to node, so the shell that srun starts there fills it in",
            f"srun {_container(allocation)}bash -c {shlex.quote(_on_a_node(command, run))} || code=$?",
            f'if [ "$code" -eq {SAVED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi  # saved in time, and not done yet',
            'exit "$code"',
            "",
        ]
    )


def _refuse(run: RunConfig, allocation: Allocation) -> None:
    """Raises UserError for amounts of time and memory and mounts that are none, and for a run whose checkpoints would
    end with the container."""
    together(
        [
            lambda: slurm_time(allocation.time),
            lambda: None if allocation.memory is None else slurm_memory(allocation.memory),
            lambda: _refuse_mounts(run, allocation),
        ]
    )


def _refuse_mounts(run: RunConfig, allocation: Allocation) -> None:
    if allocation.image is None:
        if allocation.mounts:
            raise problem("--mount", "was given without --image: there is no container to mount it in", "give --image")
        return
    problems = [
        Problem("--mount", f"{each!r} is no SRC:DST of two absolute paths", "as in --mount /scratch/data:/data")
        for each in allocation.mounts
        if not MOUNT.fullmatch(each)
    ]
    places = [PurePosixPath(each.split(":")[1]) for each in allocation.mounts if MOUNT.fullmatch(each)]
    folder = PurePosixPath(run.folder.as_posix())
    here = PurePosixPath(Path.cwd().as_posix())  # mounted at its own place
    if folder.is_absolute() and not any(folder.is_relative_to(place) for place in (here, *places)):
        why = f"the run's folder {folder} lies in no mount: checkpoints would be lost with the container"
        problems.append(Problem("output", why, "give a relative one, or mount it: --mount SRC:DST"))
    if problems:
        raise UserError(problems)


def _container(allocation: Allocation) -> str:
    """Returns srun's options for a container by pyxis: the folder that the job starts in is mounted at its own place.
    https://github.com/NVIDIA/pyxis/wiki/Usage"""
    if allocation.image is None:
        return ""
    mounts = "".join(f",{shlex.quote(each)}" for each in allocation.mounts)
    image = f"--container-image={shlex.quote(allocation.image)}"
    return f'{image} --container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD" '


def slurm_memory(text: str) -> str:
    """Returns an amount of memory as Slurm writes it: 200Gi becomes 200G, since its units count in 1024s. Raises
    UserError for another text."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGTP]?)(i?)", text)
    if found is None or (found[3] and not found[2]):
        raise problem("--memory", f"{text!r} is no amount of memory", "as in --memory 200Gi")
    each = (1024 if found[3] else 1000) ** " KMGTP".index(found[2] or " ")
    mebibytes = math.ceil(float(found[1]) * each / 2**20)
    return f"{mebibytes // 1024}G" if mebibytes % 1024 == 0 else f"{mebibytes}M"


def _on_a_node(command: Sequence[str], run: RunConfig) -> str:
    line = f"{shlex.join(command)} $RESUME"
    if run.nodes == 1:
        return f"exec {line}"
    return f'exec {line} --node-rank "$SLURM_NODEID" --rendezvous "$RENDEZVOUS"'  # nodes is among the overrides
