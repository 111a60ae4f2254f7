"""Checks a run for machines that are not this one: everything that needs no GPU, before a batch script is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from drivetrain.config import rules
from drivetrain.config.data_paths import MissingPath
from drivetrain.config.files import path_exists
from drivetrain.config.load import load, replaced
from drivetrain.config.machine import Machine
from drivetrain.config.packages import installed, needed, remedy
from drivetrain.config.resolve import resolved
from drivetrain.config.run import RunConfig
from drivetrain.config.texts import texts
from drivetrain.errors import Problem, UserError
from drivetrain.runtime.run_folder import refuse_code_of_folders

# the rules about kinds of GPUs are left to the cluster: this one is taken to be able to do everything
CAPABLE = (99, 0)


@dataclass(frozen=True)
class ClusterRun:
    """A run that no rule refuses, with its number of processes where no GPU has to be counted for it. overrides: the
    caller's and the number of nodes. notices: remarks, the number of GPUs first."""

    run: RunConfig
    overrides: list[str]
    notices: list[str]


def checked_for_cluster(
    run_file: Path,
    overrides: Sequence[str],
    nodes: int | None = None,
    where: Literal["here", "shared", "elsewhere"] = "shared",
    trust: bool = False,
) -> ClusterRun:
    """Reads a run file and applies all rules that need no GPU. Raises UserError with all problems.

    where: the job starts. On this machine ("here") every file and package has to be there. In the folder that it is
    submitted from, which the cluster shares, a relative path has to exist, and a file at an absolute path or a package
    that is missing is a notice, since only the cluster may have it. Elsewhere a relative path is a notice too.
    trust: whether code that lies beside the run file in a folder of a run may be run.
    """
    given = [*overrides, *([] if nodes is None else [f"nodes={nodes}"])]
    run, problems = load(run_file, given)
    if run is None:
        raise UserError(problems)
    there = machine_of(run)
    full, problems = rules.judged(run, problems, there)
    try:
        refuse_code_of_folders(run, run_file, trust)
    except UserError as error:
        problems += error.problems
    missing_paths = [] if where == "here" else [each for each in problems if isinstance(each, MissingPath)]
    absent = [each for each in missing_paths if where == "elsewhere" or each.path.is_absolute()]
    here = installed()
    lacking = [
        Problem(field, f"{what} needs {package}, which is not installed here", remedy(package))
        for field, what, package in needed(full)
        if package not in here
    ]
    refused = [*(each for each in problems if each not in absent), *(lacking if where == "here" else [])]
    if refused:
        raise UserError([*refused, *absent])
    missing = [f"{each.field}: {each.path} does not exist here; the cluster has to have it" for each in absent]
    if where == "elsewhere":
        missing += _relative(full, [each.path for each in absent])
    missing += [f"{each.field}: {each.why}; the cluster has to have it" for each in lacking]
    twice = replace(there, device_count=2 * there.device_count)
    is_open = run.processes is None and resolved(run, twice).devices != full.devices
    known = run if is_open else run.model_copy(update={"processes": full.devices // full.nodes})
    return ClusterRun(known, given, [*_size(run, full, is_open), *replaced(run_file, given), *missing])


def _relative(run: RunConfig, absent: Sequence[Path]) -> list[str]:
    """Returns a notice with the relative paths of a run, those that are not here included: what is here lies elsewhere
    in a pod."""
    blocks = {"workload": run.workload.model_dump(mode="json"), "engine": run.engine.model_dump(mode="json")}
    here = (each for each in texts(blocks) if ("/" in each or Path(each).suffix) and path_exists(each))
    found = dict.fromkeys(each for each in (*here, *map(str, absent)) if not Path(each).is_absolute())
    if not found:
        return []
    where = "the work folder (--work-folder, or the first volume)"
    return [f"relative paths begin in {where} and have to be there: {', '.join(found)}"]


def machine_of(run: RunConfig) -> Machine:
    """Returns a machine of the cluster: as many devices as the run takes of it."""
    device = "cpu" if run.device == "cpu" else "cuda"
    one = Machine(
        device=device,
        device_name="a machine of the cluster",
        device_count=1,
        memory_bytes=0,  # no rule reads it
        cpu_cores=1,
        compute_capability=CAPABLE if device == "cuda" else None,
        native_dtypes=frozenset({"float32", "bfloat16", "float16"}),
    )
    full = resolved(run, one)
    # an engine may need more than one device a node for its smallest world, such as the shards of HSDP
    least = math.lcm(full.engine.smallest_world, full.nodes) // full.nodes if run.processes is None else 1
    return replace(one, device_count=max(least, full.devices // full.nodes))


def _size(run: RunConfig, full: RunConfig, is_open: bool) -> list[str]:
    """Returns the product of nodes and processes, and the share of the global batch that each device gets. is_open: the
    number of processes depends on the devices of the cluster's nodes."""
    kind = "CPU ranks" if run.device == "cpu" else "GPUs"
    nodes = f"{run.nodes} node{'s' * (run.nodes > 1)}"
    if is_open:
        unknown = f"{nodes}, and processes was left out: a rank for each GPU that a node has"
        asks = "" if run.device == "cpu" else "; the script asks Slurm for none: give processes, the GPUs of one node"
        return [unknown + asks]
    each = full.devices // full.nodes
    share, rest = divmod(full.global_batch, full.data_parallel_size)
    samples = f"{share} to {share + 1}" if rest else f"{share}"
    whose = "each" if full.data_parallel_size == full.devices else f"for each of {full.data_parallel_size} data ranks"
    plural = "s" * (samples != "1")
    count = f"{nodes} x {each} process{'es' * (each > 1)} = {full.devices} {kind if full.devices > 1 else kind[:-1]}"
    return [f"{count}; {samples} sample{plural} {whose} of the global batch of {full.global_batch}"]
