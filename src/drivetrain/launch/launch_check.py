"""`drivetrain launch --check`: looks for what would stop a run on the machines that it is launched on, before a
command, a batch script or manifests are written.

For this machine it is `drivetrain check`. For a cluster it is the part of it that this machine can do: data and model
are looked at where they are here. The plan's verdict counts in both: a run that would not fit is not launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drivetrain.config import rules
from drivetrain.config.data_paths import MissingPath
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.config.texts import texts
from drivetrain.errors import Problem, UserError
from drivetrain.launch.cluster import ClusterRun, machine_of
from drivetrain.launch.cluster_plan import plan_verdict
from drivetrain.launch.dry_run import DryRun, dry_run, read_first
from drivetrain.launch.variables import of_the_run, variables
from drivetrain.runtime.library_messages import hush
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.tracking.build import check_trackers
from drivetrain.training import preflight
from drivetrain.training.assemble import optimizer_of, read_workload
from drivetrain.training.model_memory import counted, refuse_too_large

UNBOUNDED = 2**62  # bytes of a cluster's devices, whose size the plan judges


def check_here(run_file: Path, overrides: Sequence[str], nodes: int | None, trust: bool) -> list[str]:
    """Returns notices. Raises UserError with everything for which the run would not start on this machine, or with the
    plan's verdict if it would not fit."""
    found = dry_run(run_file, overrides, nodes, trust=trust)
    plan = found.facts.get("plan")
    if plan is not None and plan["fits"] == "no":
        found.problems.append(_too_large(plan["verdict"], run_file, "this machine"))
    if found.problems:
        raise UserError(found.problems)
    planned = [] if plan is None or plan["fits"] != "yes" else [f"planned: {plan['verdict']}"]
    return [*found.notices, *planned, "checked: nothing would be refused"]


def check_for_cluster(run_file: Path, job: ClusterRun, machine: str | None, shares_folder: bool) -> list[str]:
    """Returns notices. Raises UserError with everything for which the run would not start on a cluster, as far as it
    shows here, or with the plan's verdict if it would not fit.

    machine: as `drivetrain plan --machine` takes it; None: whether the run fits is not known. shares_folder: whether
    the job works in the folder that this command was called in.
    """
    hush()
    there = replace(machine_of(job.run), memory_bytes=UNBOUNDED)
    run, problems = rules.judged(job.run, [], there)
    elsewhere = [each.field for each in problems if isinstance(each, MissingPath)]
    result = DryRun(run, [each for each in problems if not isinstance(each, MissingPath)])
    if not result.is_ready:
        raise UserError(result.problems)
    if shares_folder:
        sources = texts(run.model_dump(mode="json"))
        result.collect(lambda: RunFolder(run.folder).refuse_unless_ready(False, False, sources))
    result.collect(lambda: check_trackers(run.tracking.trackers))
    if elsewhere:
        result.notices.append(f"not checked: data and model; {', '.join(elsewhere)} is not on this machine")
    else:
        with variables(of_the_run(run, there.device)):
            _look_at_the_work(result, run, there)
    verdict = result.collect(lambda: plan_verdict(job.run, machine))
    if verdict is not None and verdict.fits is False:
        result.problems.append(_too_large(verdict.sentence, run_file, f"--machine {machine}"))
    if verdict is None or not result.is_ready:
        raise UserError(result.problems)
    return [*result.notices, verdict.sentence, "checked: nothing would be refused, as far as it shows on this machine"]


def _too_large(verdict: str, run_file: Path, where: str) -> Problem:
    fix = f"find a way that fits with `drivetrain plan {run_file}`, or launch without --check"
    return Problem("plan", f"the run does not fit on {where}: {verdict}", fix)


def _look_at_the_work(result: DryRun, run: RunConfig, there: Machine) -> None:
    """Reads data, and builds model and optimizer. A model that is too large for this machine is not built."""
    before = len(result.problems)
    result.collect(lambda: _refuse_files(run))
    fits = len(result.problems) == before
    workload = result.collect(lambda: read_workload(run, training=True)) if fits else None
    if workload is None:
        return
    result.collect(lambda: read_first(workload))
    result.collect(lambda: preflight.start_processes(workload, keep=False))
    result.notices += preflight.workload_notes(run, workload)
    try:
        refuse_too_large(run, there, True, counted(run))
    except UserError as error:
        result.notices.append(f"not checked: the model is not built here: {error.problems[0].why}")
        return
    model = result.collect(workload.build_model)
    if model is not None:
        result.collect(lambda: optimizer_of(run)(model))


def _refuse_files(run: RunConfig) -> None:
    problems = [*run.workload.file_problems()]
    if problems:
        raise UserError(problems)
