"""Commands that start a run without a cluster's scheduler: by drivetrain itself, or by torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from drivetrain.config.run import RunConfig
from drivetrain.errors import problem
from drivetrain.launch.slurm import PORT


def local_command(run_file: Path, overrides: Sequence[str], run: RunConfig) -> str:
    """Returns the command that starts the run on this machine. Raises UserError for a run of several machines."""
    if run.nodes > 1:
        fix = "leave it out, or give --torchrun, --ray, --slurm, --kubernetes or --jobset"
        raise problem("--nodes", f"{run.nodes} was given, and --local starts the run on this machine alone", fix)
    return shlex.join(["drivetrain", "train", str(run_file), *overrides]) + "\n"


def torchrun_command(run_file: Path, overrides: Sequence[str], run: RunConfig) -> str:
    """Returns torchrun's command, the same for each machine; $FIRST is the name of the first one."""
    ranks = run.processes or ("gpu" if run.device != "cpu" and run.engine.takes_processes else 1)
    line = ["torchrun", "--nproc-per-node", str(ranks)]
    meeting = ""
    if run.nodes > 1:
        line += ["--nnodes", str(run.nodes), "--rdzv-backend", "c10d"]
        meeting = f' --rdzv-endpoint "$FIRST:{PORT}"'
    training = ["-m", "drivetrain", "train", str(run_file), *overrides]
    return f"{shlex.join(line)}{meeting} {shlex.join(training)}\n"


def ray_command(run_file: Path, overrides: Sequence[str], run: RunConfig) -> str:
    """Returns the command for a machine of a Ray cluster; the ranks start where the cluster has room. Raises UserError
    where the number of ranks is open."""
    if run.processes is None and run.engine.takes_processes:
        why = "was left out: Ray has to know how many devices of a machine to hold"
        raise problem("processes", why, "give the ranks of one machine, as in processes=8")
    return shlex.join(["drivetrain", "train", str(run_file), *overrides, "--ray", "auto"]) + "\n"
