"""The dry run: finds whatever `train` would refuse, all of it at once, and leaves nothing behind.

It reads the data and builds the model in one process, as a training does, but wraps nothing, starts no rank and writes
no file but the cache of prepared data, which the training then finds.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from drivetrain.config.load import load, replaced
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.run import RunConfig
from drivetrain.config.texts import texts
from drivetrain.data.remote_sources import fetched
from drivetrain.data.streams.endless import draws, known_length
from drivetrain.engines.replaced_layers import check_installed
from drivetrain.engines.state import kept
from drivetrain.errors import Problem, UserError, last_line, problem
from drivetrain.launch.auto_choice import decided
from drivetrain.launch.prepare import Judged, judged
from drivetrain.launch.variables import of_the_run, variables
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.estimate import Traced
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.machines import this_machine
from drivetrain.plan.rows import row
from drivetrain.runtime.library_messages import hush
from drivetrain.runtime.run_folder import RunFolder, refuse_code_of_folders
from drivetrain.tracking.build import check_trackers
from drivetrain.training import preflight
from drivetrain.training.assemble import optimizer_of, read_workload
from drivetrain.training.auto_settings import order_of, total_steps_of
from drivetrain.training.model_memory import counted, refuse_too_large
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import MakesSamples

T = TypeVar("T")
Part = Literal["data", "model", "plan"]


@dataclass
class DryRun:
    """The result. run: as it would start; None where the run file cannot be read. facts: by name, for the reader and as
    JSON."""

    run: RunConfig | None = None
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return not self.problems

    def collect(self, call: Callable[[], T]) -> T | None:
        """Returns the result of a check, or None where it raises UserError, whose problems are kept: one a field."""
        try:
            return call()
        except UserError as error:
            known = {each.field for each in self.problems}
            self.problems += [each for each in error.problems if each.field not in known]
            return None


Seen = Callable[[DryRun, Part], None]


def dry_run(
    run_file: Path,
    overrides: Sequence[str] = (),
    nodes: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    trust: bool = False,
    seen: Seen = lambda *_: None,
) -> DryRun:
    """Checks a run file on this machine as `train` does before its first step, with the options of `train`.

    What only a checkpoint's content shows is left to --resume. seen: called before each part with what the parts before
    it have shown.
    """
    hush()
    result = DryRun()
    given = [*overrides, *([] if nodes is None else [f"nodes={nodes}"])]
    choice = result.collect(lambda: decided(run_file, given, anew=not resume, trust=trust))
    found = None if choice is None else result.collect(lambda: _judged(run_file, choice.overrides, trust))
    if found is None or choice is None:
        return result
    run, machine = found.run, found.machine
    replacing = replaced(run_file, choice.overrides)
    notes = [*choice.notices, *replacing, *notices(run, machine, found.problems)]
    result = DryRun(run, list(found.problems), notes, {"run": _of_the_run(run, machine)})
    sources = texts(run.model_dump(mode="json"))
    result.collect(lambda: RunFolder(run.folder).refuse_unless_ready(resume, overwrite, sources))
    result.collect(lambda: check_trackers(run.tracking.trackers))
    with variables(of_the_run(run, machine.device)):
        _look_at_the_work(result, run, machine, overwrite and not resume, seen)
    return result


def _judged(run_file: Path, overrides: Sequence[str], trust: bool) -> Judged:
    run, problems = load(run_file, overrides)
    if run is not None:
        refuse_code_of_folders(run, run_file, trust)
    found = judged(run, problems, node=None)
    return found if found.problems else replace(found, run=fetched(found.run))


def _look_at_the_work(result: DryRun, run: RunConfig, machine: Machine, is_replaced: bool, seen: Seen) -> None:
    """Adds what data and model show. Either is left out where its own settings are wrong already."""
    wrong = {each.field.split(".")[0] for each in result.problems}
    make_optimizer = result.collect(lambda: optimizer_of(run)) if "optimizer" not in wrong else None
    result.collect(lambda: check_installed(run.precision_spec))
    count = counted(run) if "workload" not in wrong else None
    before = len(result.problems)
    result.collect(lambda: refuse_too_large(run, machine, True, count))
    is_too_large = len(result.problems) > before
    if "workload" in wrong:
        return
    seen(result, "data")
    is_cut = not wrong & {"batch_size", "batch_size_per_device", "micro_batch_size", "loop"}
    workload = result.collect(lambda: read_workload(run, training=is_cut))
    if workload is None:
        return
    result.collect(lambda: read_first(workload))
    result.collect(lambda: preflight.start_processes(workload, keep=False))
    result.facts |= {"data": _of_the_data(workload)}
    if is_cut:
        result.notices += preflight.workload_notes(run, workload)
        order = order_of(run, workload)
        result.facts |= {"steps": total_steps_of(run, order), "steps_per_epoch": _finite(order.steps_per_epoch)}
    seen(result, "model")
    model = result.collect(workload.build_model) if not is_too_large and "adapter" not in wrong else None
    if model is None:
        return
    if make_optimizer is not None:
        result.collect(lambda: make_optimizer(model))
    result.facts |= {"model": _of_the_model(model)}
    result.notices += result.collect(lambda: _room(result, run, model, is_replaced)) or []
    if {each.field for each in result.problems} <= {"output"}:  # a folder that is taken hides nothing of the work
        del model  # the plan has one without numbers
        seen(result, "plan")
        result.collect(lambda: _plan(result, run, machine, workload))


def read_first(workload: Workload) -> None:
    """Makes a batch of the first samples. Raises UserError if they cannot be read, by whatever error of user code."""
    try:
        workload.collate([workload.train.load(index, 0) for index in draws(workload.train, 2)])
    except UserError:
        raise
    except Exception as error:
        fix = "read them with `drivetrain data`, or correct the code that reads them"
        raise problem("workload", f"the first samples make no batch: {last_line(error)}", fix) from error


def _plan(result: DryRun, run: RunConfig, machine: Machine, workload: Workload) -> None:
    """Adds what the run would take, by a plan, to the facts. Raises UserError for what its engine refuses when it wraps
    the model; a run that would not fit is a notice, since training finds out for certain."""
    here = replace(this_machine(catalogue()).over(run.nodes), host=machine)
    estimator = Traced(here)
    estimator.samples.hold(run, workload)
    try:
        planned = row(run, run, estimator.costs(run), estimator)
    except NotPlanned as error:
        result.notices.append(f"no plan: {error}")
        return
    assert planned.costs is not None
    result.facts["plan"] = {
        "fits": planned.fits,
        "allocated_bytes": planned.costs.memory.allocated,
        "capacity_bytes": planned.capacity,
        "step_seconds": planned.seconds,
        "verdict": planned.verdict,
    }
    if planned.fits != "yes":
        result.notices.append(f"planned: {planned.verdict}")


def _room(result: DryRun, run: RunConfig, model: nn.Module, is_replaced: bool) -> list[str]:
    """Adds the bytes of a checkpoint to the facts. Returns warnings; raises UserError if none fits on the disk."""
    shapes = {name: tensor.shape for name, tensor in kept(model, model.state_dict()).items()}
    size = preflight.checkpoint_bytes(run, shapes, result.facts["model"]["trained_parameters"])
    folder = RunFolder(run.folder).checkpoints
    there = next(path for path in folder.absolute().parents if path.exists())
    number = run.checkpoints.keep_last + run.checkpoints.keep_best
    result.facts |= {
        "checkpoints": {"bytes": size, "kept": number, "free_bytes": shutil.disk_usage(there).free},
        "folder": str(run.folder),
    }
    return preflight.disk(run, size, folder, is_replaced)


def _of_the_run(run: RunConfig, machine: Machine) -> dict[str, Any]:
    batch = run.batch_size or run.batch_size_per_device
    return {
        "engine": run.engine.label,
        "ranks": run.world_size,
        "precision": run.precision,
        "batch_size": run.global_batch if batch is not None else None,
        "device": machine.device_name,
    }


def _finite(steps: float) -> int | None:
    """Returns the steps of an epoch; None for samples that are drawn without end."""
    return int(steps) if math.isfinite(steps) else None


def _of_the_data(workload: Workload) -> dict[str, Any]:
    evaluation = workload.evaluation
    return {
        "training_samples": known_length(workload.train),
        "evaluation_samples": 0 if evaluation is None else known_length(evaluation),
        "unit": "prompt" if isinstance(workload, MakesSamples) else "sample",
    }


def _of_the_model(model: nn.Module) -> dict[str, Any]:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return {
        "parameters": sum(size for size, _ in sizes),
        "trained_parameters": sum(size for size, trained in sizes if trained),
    }
