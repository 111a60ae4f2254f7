"""Writes a SkyPilot task: machines of a cloud or a Kubernetes cluster, each of which starts its node's ranks.

Fields and variables: https://docs.skypilot.co/en/latest/reference/yaml-spec.html. `sky jobs launch` starts a recovered
job on fresh machines, where only a volume or the run's mirror still has its checkpoints.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError, shown
from drivetrain.launch.kubernetes import object_name
from drivetrain.launch.slurm import PORT, SAVED, slurm_memory
from drivetrain.plan.catalogue import catalogue

NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)  # SkyPilot writes NAME:COUNT


@dataclass(frozen=True)
class Wanted:
    """Holds what SkyPilot is asked for. accelerator: a GPU as `sky show-gpus` calls it. volumes: NAME:/place each.
    cpus, memory: of a node, as elsewhere ("200Gi")."""

    image: str | None
    accelerator: str | None
    volumes: Sequence[str] = ()
    cpus: int | None = None
    memory: str | None = None
    restarts: int = 10

    @property
    def notices(self) -> list[str]:
        """Returns a remark on a GPU that the plan's catalogue does not know. SkyPilot may: it has clouds' names."""
        known = catalogue()
        if self.accelerator is None or known.knows(self.accelerator):
            return []
        near = known.near(self.accelerator)
        meant = f": did you mean {near}?" if near else ";"
        return [f"--accelerator {self.accelerator} is not known here{meant} `sky show-gpus` lists what SkyPilot takes"]


def skypilot_task(run_file: Path, overrides: Sequence[str], run: RunConfig, wanted: Wanted) -> dict[str, Any]:
    """Returns the task. Raises UserError with all that would lose the run, or never start it."""
    volumes, problems = _volumes(wanted)
    problems += _problems(run_file, run, wanted, volumes)
    if problems:
        raise UserError(problems)
    resources: dict[str, Any] = {"image_id": f"docker:{wanted.image}"}
    if run.device != "cpu":
        resources["accelerators"] = f"{wanted.accelerator}:{run.processes}"
    if wanted.cpus is not None:
        resources["cpus"] = f"{wanted.cpus}+"
    if wanted.memory is not None:
        resources["memory"] = f"{_gib(wanted.memory)}+"
    # an error is tried again so often; a save at the end (143) and lost machines are not counted
    resources["job_recovery"] = {"max_restarts_on_errors": wanted.restarts, "recover_on_exit_codes": [SAVED]}
    return {
        "name": object_name(run.name),
        "workdir": ".",  # brought to each machine, the run file with it
        "num_nodes": run.nodes,
        "resources": resources,
        **({"volumes": dict(volumes)} if volumes else {}),
        "run": _script(run_file, overrides, run),
    }


def _volumes(wanted: Wanted) -> tuple[dict[str, str], list[Problem]]:
    """Returns the volume for each place."""
    found, problems = dict[str, str](), list[Problem]()
    for each in wanted.volumes:
        name, _, place = each.partition(":")
        if not name or not place.startswith("/"):
            problems.append(Problem("--volume", f"{each!r} is no NAME:/place", "as in --volume runs:/runs"))
        elif place in found:
            problems.append(Problem("--volume", f"{place} is named twice", "give each volume a place of its own"))
        else:
            found[place] = name
    return found, problems


def _problems(run_file: Path, run: RunConfig, wanted: Wanted, volumes: Mapping[str, str]) -> list[Problem]:
    found = []
    if not wanted.image:
        found.append(Problem("--image", "was not given", "name an image with drivetrain in it"))
    if run_file.is_absolute() or ".." in run_file.parts:
        why = f"{run_file} does not lie in this folder, which is what SkyPilot brings to the machines"
        found.append(Problem("RUN_FILE", why, "call this in the run file's folder, or one above it"))
    if run.device != "cpu" and not wanted.accelerator:
        found.append(Problem("--accelerator", "was not given", "name a GPU as `sky show-gpus` does, as H100"))
    if wanted.accelerator and not NAME.fullmatch(wanted.accelerator):
        why = f"{shown(wanted.accelerator)} is no name of a GPU"
        found.append(Problem("--accelerator", why, "give the name alone, as H100: `processes` is how many a node has"))
    if run.device != "cpu" and run.processes is None:
        found.append(Problem("processes", "was left out: SkyPilot asks for so many GPUs", "give the GPUs of one node"))
    folder = PurePosixPath(run.folder.as_posix())
    kept = any(folder.is_relative_to(place) for place in volumes)
    if run.nodes > 1 and not kept:
        why = f"the run's folder {folder} lies in no volume: all machines have to see it"
        found.append(Problem("output", why, "mount one that all can write: --volume runs:/runs output=/runs/NAME"))
    elif not kept and run.mirror is None:
        why = f"the run's folder {folder} would be lost with its machine"
        found.append(Problem("mirror", why, "give mirror=s3://BUCKET/FOLDER, or --volume runs:/runs output=/runs/NAME"))
    return found


def _script(run_file: Path, overrides: Sequence[str], run: RunConfig) -> str:
    line = ["exec", "drivetrain", "train", str(run_file), *overrides, "--resume"]
    if run.nodes == 1:
        return shlex.join(line) + "\n"
    first = 'first="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"\n'
    return f'{first}{shlex.join(line)} --node-rank "$SKYPILOT_NODE_RANK" --rendezvous "$first:{PORT}"\n'


def _gib(memory: str) -> int:
    """Returns whole GiB, rounded up, which SkyPilot counts memory in."""
    text = slurm_memory(memory)
    return int(text[:-1]) if text.endswith("G") else -(-int(text[:-1]) // 1024)
