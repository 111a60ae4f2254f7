"""Puts others' state into a run's folder, as a checkpoint from which it goes on.

The run's own model and optimizer are made on this CPU, in fp32, and take up the state; then they are saved like those
of any run. So a state that does not fit is found here, and not at the first resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.convert import optimizer_names
from drivetrain.checkpoint.convert.foreign import Moments, Note, Positions, Theirs
from drivetrain.checkpoint.convert.parameter_names import named, shaped, with_tied
from drivetrain.checkpoint.directory import check_fits, steps
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import problem
from drivetrain.replay import on_one_process
from drivetrain.runtime.lock import refuse_if_held
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training.assemble import assemble
from drivetrain.training.progress import Progress
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.training.workload_rules import best_metric
from drivetrain.workloads.base import Workload

STATES = {  # of each optimizer what it cannot go on without
    "sgd": {"momentum_buffer"},
    "adam": {"exp_avg", "exp_avg_sq", "step"},
    "adamw": {"exp_avg", "exp_avg_sq", "step"},
    "adafactor": {"step"},
}
COMPARED = ("lr", "betas", "eps", "weight_decay", "momentum")


def refuse(run: RunConfig) -> None:
    """Raises UserError for a run that cannot take others' checkpoints, and for a folder that is in use."""
    folder = RunFolder(run.folder)
    refuse_if_held(run.folder)
    if steps(folder.checkpoints):
        why = f"{run.folder} holds checkpoints already"
        raise problem("output", why, "give another output or name")
    if run.adapter is not None:
        why = "the run trains adapters, and others' checkpoints hold them in PEFT's files"
        raise problem("adapter", why, "give PEFT's folder as adapter.path instead")


def put(
    theirs: Theirs, run: RunConfig, machine: Machine, given_step: int | None, source: Path
) -> tuple[Path, list[Note]]:
    """Returns the new checkpoint, and the fate of each part. Raises UserError if the weights are of another model."""
    spec = run.precision_spec
    precision = run.precision if spec.scaled and spec.autocast else "fp32"  # of all others no state is scaled
    alone = run.model_copy(
        update={"precision": precision, "device": "cpu", "recompute": False, "offload_activations": False}
    )
    workload, engine = assemble(on_one_process(alone), machine, Communicator(), training=True)
    try:
        notes = _fill(theirs, run, engine, source)
        progress = _progress(theirs, run, given_step, notes)
        path = _saved(run, workload, engine, progress)
    finally:
        engine.close()
    return path, [*notes, *theirs.notes, *_own(theirs, run, progress)]


def _fill(theirs: Theirs, run: RunConfig, engine: Engine, source: Path) -> list[Note]:
    own, shapes = engine.state_dict(), engine.shapes()
    weights = shaped(with_tied(named(theirs.weights, shapes), own["model"]), shapes)
    check_fits(shapes, weights, source)
    theirs.moments = _by_name(theirs, shapes, own["optimizer"]["param_groups"])
    moments, notes = _moments(theirs.moments, run, shapes)
    optimizer = {**own["optimizer"], "state": moments or own["optimizer"]["state"]}
    scaler = own["engine"]["scaler"] | {k: v for k, v in (theirs.scaler or {}).items() if k in own["engine"]["scaler"]}
    engine.load_state_dict({"model": weights, "optimizer": optimizer, "engine": {"scaler": scaler}})
    notes.insert(0, Note("weights", carried=True, what=f"{len(weights)} tensors, {_dtypes(weights)} there"))
    if theirs.scaler and scaler:
        notes.append(Note("loss scale", carried=True, what=f"{scaler['scale']:g}"))
    elif theirs.scaler:
        notes.append(Note("loss scale", carried=False, what=f"{run.precision} begins with its own, if it scales"))
    if theirs.clipping != run.loop.max_grad_norm and theirs.clipping is not None:
        here = "not set" if run.loop.max_grad_norm is None else f"{run.loop.max_grad_norm:g}"
        what = f"at {theirs.clipping:g} there, loop.max_grad_norm is {here} here: the run file's holds"
        notes.append(Note("gradient clipping", carried=False, what=what))
    return notes + _arguments(theirs.arguments, own["optimizer"]["param_groups"])


def _by_name(theirs: Theirs, shapes: dict[str, torch.Size], groups: list[dict[str, Any]]) -> Moments | None:
    own = [group["params"] for group in groups]
    trained = {name: shape for name, shape in shapes.items() if any(name in names for names in own)}
    if isinstance(theirs.moments, Positions):
        return optimizer_names.by_name(theirs.moments, trained, own)
    return None if theirs.moments is None else named(theirs.moments, trained)


def _moments(given: Moments | None, run: RunConfig, shapes: dict[str, torch.Size]) -> tuple[Moments, list[Note]]:
    """Returns the moments from which the run's optimizer can go on: all of them, or none."""
    name, item = run.optimizer.name, "optimizer's states"
    if given is None:
        return {}, [Note(item, carried=False, what="there are none: they begin anew")]
    if name not in STATES:
        return {}, [Note(item, carried=False, what=f"{name} keeps others: they begin anew")]
    keys = sorted({key for state in given.values() for key in state})
    if name == "sgd" and not run.optimizer.momentum:
        return {}, [Note(item, carried=not keys, what="without momentum there are none")]
    lacking = sorted({key for key in STATES[name] for state in given.values() if state.get(key) is None})
    if lacking or not given:
        what = f"{name} needs {', '.join(sorted(STATES[name]))}, and theirs are {', '.join(keys) or 'none'}"
        return {}, [Note(item, carried=False, what=f"{what}: they begin anew")]
    unknown = sorted(given.keys() - shapes.keys())
    if unknown:
        why = f"there are states of {', '.join(unknown[:3])}, which this model does not have"
        raise problem("workload.model", why, "give the run file of that model, or --weights-only")
    moments = {key: {k: _state(v, shapes[key]) for k, v in state.items()} for key, state in given.items()}
    return moments, [Note(item, carried=True, what=f"of {len(moments)} parameters: {', '.join(keys)}")]


def _state(value: Any, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor):
        return torch.tensor(float(value)) if isinstance(value, int | float) else value
    return shaped({"": value}, {"": shape})[""].float() if value.is_floating_point() else value


def _progress(theirs: Theirs, run: RunConfig, given: int | None, notes: list[Note]) -> Progress:
    moments = theirs.moments if isinstance(theirs.moments, dict) else {}
    counted = [int(state["step"]) for state in moments.values() if "step" in state]
    step = given if given is not None else theirs.step if theirs.step is not None else max(counted, default=None)
    if step is None:
        raise problem("--step", "the checkpoint does not record its step", "give --step N")
    if counted and max(counted) not in (step - theirs.skipped, step):
        what = f"the optimizer has made {max(counted)} updates, and the checkpoint is of step {step}"
        notes.append(Note("updates", carried=True, what=what))
    samples = theirs.samples if theirs.samples is not None and given is None else step * run.global_batch
    updates = min([step - theirs.skipped, *([max(counted)] if counted else [])])  # the schedule goes by these
    return Progress(step=step, updates=updates, samples=int(samples), last_evaluation=-1, last_save=step)


def _saved(run: RunConfig, workload: Workload, engine: Engine, progress: Progress) -> Path:
    at_once = run.model_copy(update={"checkpoints": run.checkpoints.model_copy(update={"asynchronous": False})})
    metric, root = best_metric(run, workload), RunFolder(run.folder).checkpoints
    with RunCheckpoints(root, at_once, engine, Communicator(), metric, workload.train, lambda _: None) as checkpoints:
        checkpoints.save(progress)
    return steps(root)[-1]


def _own(theirs: Theirs, run: RunConfig, progress: Progress) -> Iterator[Note]:
    """Yields the state that no format holds in a form with which this project could go on."""
    has_schedule = any("schedul" in note.item for note in theirs.notes)
    yield Note("step", carried=True, what=f"{progress.step}, {progress.updates} updates, {progress.samples:,} samples")
    if progress.step:
        what = f"the run goes on with batch {progress.step + 1} of its own order (seed {run.seed})"
        yield Note("position in the data", carried=False, what=what)
        if not has_schedule:
            what = f"the run file's schedule goes on at update {progress.updates}"
            yield Note("learning-rate schedule", carried=False, what=what)
    yield Note("random states", carried=False, what=f"generators begin at seed {run.seed}: dropout draws other masks")


def _arguments(given: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[Note]:
    """Notes where arguments such as the rate differ: the run file's hold."""
    differing = []
    for key in COMPARED:
        theirs = sorted({str(_plain(group.get(f"initial_{key}", group[key]))) for group in given if key in group})
        ours = sorted({str(_plain(group.get(f"peak_{key}", group[key]))) for group in own if key in group})
        if theirs and ours and theirs != ours:
            differing.append(f"{key} {' and '.join(theirs)} there, {' and '.join(ours)} here")
    what = f"{'; '.join(differing)}: the run file's hold"
    return [Note("arguments", carried=False, what=what)] if differing else []


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(value) if isinstance(value, list | tuple) else value


def _dtypes(weights: dict[str, Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}))
