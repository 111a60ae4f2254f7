"""Writes a batch script for Slurm: one task a node, each of which starts that node's ranks. A job that saved at its end
is put into the queue again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.config.run import RunConfig

PORT = 29500
SAVED = 143  # the run's exit code when SIGTERM ended it and it has saved


@dataclass(frozen=True)
class Allocation:
    """The resources that the job requests from Slurm."""

    time: str  # HH:MM:SS
    partition: str | None = None
    account: str | None = None
    cpus: int | None = None  # of each node


def sbatch_script(run_file: Path, overrides: Sequence[str], run: RunConfig, allocation: Allocation) -> str:
    """Returns the script's text; processes and nodes are the run's."""
    asked = {
        "job-name": run.name,
        "nodes": run.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": run.processes if run.device != "cpu" else None,
        "cpus-per-task": allocation.cpus,
        "time": allocation.time,
        "partition": allocation.partition,
        "account": allocation.account,
        "signal": f"TERM@{run.grace_seconds}",  # before the end of the job
        "output": "%x-%j.log",
        "open-mode": "append",  # a job that starts again writes into the same log
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None]
    lines.append("#SBATCH --requeue")  # also by Slurm itself, when a node fails or the job is preempted
    command = ["drivetrain", "train", str(run_file), *overrides]
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
            "code=0",
            "# the rank differs from node to node, so the shell that srun starts there fills it in",
            f"srun bash -c {shlex.quote(_on_a_node(command, run))} || code=$?",
            f'if [ "$code" -eq {SAVED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi  # saved in time, and not done yet',
            'exit "$code"',
            "",
        ]
    )


def _on_a_node(command: Sequence[str], run: RunConfig) -> str:
    line = f"{shlex.join(command)} $RESUME"
    if run.nodes == 1:
        return f"exec {line}"
    return f'exec {line} --node-rank "$SLURM_NODEID" --rendezvous "$RENDEZVOUS"'  # nodes is among the overrides
