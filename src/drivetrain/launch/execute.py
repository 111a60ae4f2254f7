"""Does a job in this process: all of it, or one rank's part. What only one verb needs is imported by that verb."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from drivetrain.distributed.communicator import is_first_rank
from drivetrain.launch.group import group_of_one
from drivetrain.launch.job import Job, Result
from drivetrain.launch.variables import QUIET_PROFILER, of_the_run, variables
from drivetrain.memory.allocator import grow_segments
from drivetrain.memory.garbage import importing
from drivetrain.memory.limit import limited
from drivetrain.objects import held
from drivetrain.runtime.attempt import Attempt
from drivetrain.runtime.hardware import detect
from drivetrain.runtime.heartbeat import Heart
from drivetrain.runtime.library_messages import hush
from drivetrain.runtime.run_folder import RunFolder


def perform(task: Job, attempt: Attempt | None = None, heart: Heart | None = None) -> Result:
    """Does the job. Users' errors and failed runs are raised. attempt: the number of this start, for a training."""
    if task.objects is not None and not held.held():
        from drivetrain.objects import carry

        with held.holding(carry.read(task.objects)):
            return perform(task.model_copy(update={"objects": None}), attempt, heart)
    hush()
    device = detect(task.run.device).device
    if device == "cuda" and task.run.allocator != "system":
        grow_segments()
    with variables(of_the_run(task.run, device)), group_of_one(task.run.engine.traits.spreads):
        if task.verb == "fit":
            return _fit(task, attempt)
        with limited(task.run.memory_limit_bytes, device):
            return _train(task, attempt or Attempt(), heart) if task.verb == "train" else _PERFORMERS[task.verb](task)


def _train(task: Job, attempt: Attempt, heart: Heart | None) -> Result:
    with importing():
        from drivetrain.training.run import run
    machine = detect(task.run.device)
    report, code = run(task.run, machine, task.notices, task.resume, task.overwrite, task.quiet, attempt, heart)
    if task.planned is not None:
        report = report.model_copy(update={"planned": task.planned})
        if is_first_rank():
            report.write(RunFolder(task.run.folder).report)
    return Result(code=code, value=report.model_dump())


def _fit(task: Job, attempt: Attempt | None) -> Result:
    from drivetrain.training.batch_size_finder import find

    folder = None if attempt is None else attempt.folder
    assert folder is not None, "sizes are tried in processes of their own"
    return Result(code=0, value=asdict(find(task.run, detect(task.run.device), folder, task.quiet)))


def _evaluate(task: Job) -> Result:
    from drivetrain.inference import verbs

    assert task.checkpoint is not None
    return Result(code=0, value=verbs.evaluate(task.run, detect(task.run.device), task.checkpoint, task.scores))


def _predict(task: Job) -> Result:
    """Returns the number of rows; they go to the job's output or, one JSON object a line, to the screen."""
    from drivetrain.inference import verbs
    from drivetrain.inference.prediction_file import PredictionFile

    assert task.checkpoint is not None
    file = None if task.output is None else PredictionFile(task.output, task.overwrite)
    begin = None if file is None else file.begin
    shown = file is not None or not sys.stdout.isatty()  # a line between rows on a terminal would be in their way
    rows = verbs.predict(task.run, detect(task.run.device), task.checkpoint, task.data, task.texts, begin, shown)
    if not is_first_rank():
        return Result(code=0, value=sum(1 for _ in rows))
    if file is not None:
        return Result(code=0, value=file.write(rows))
    count = sum(1 for row in rows if _print(row))
    return Result(code=0, value=count)


def _print(row: dict[str, Any]) -> bool:
    sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    return True


def _time_predictions(task: Job) -> Result:
    from drivetrain.inference import timing

    report = timing.time_predictions(task.run, detect(task.run.device), task.checkpoint)
    return Result(code=0, value=report.model_dump())


def _trace(task: Job) -> Result:
    """Records a trace. resume: whether to test one in the middle."""
    from drivetrain.prove.trace import trace

    found = trace(task.run, detect(task.run.device), task.steps, task.resume, task.evaluates, _tell)
    return Result(code=0, value=found.model_dump())


def _profile(task: Job) -> Result:
    from drivetrain.profile.recording import record

    with variables(QUIET_PROFILER):
        return Result(code=0, value=record(task.run, detect(task.run.device), task.steps, task.output))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_PERFORMERS = {
    "evaluate": _evaluate,
    "predict": _predict,
    "time_predictions": _time_predictions,
    "trace": _trace,
    "profile": _profile,
}
