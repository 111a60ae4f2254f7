"""`drivetrain replay`: repeats one step of a run on one process and looks at every layer.

The run is rebuilt from its folder, takes up the newest state it kept before the step, and goes forward to it as it did
the first time: samples, schedule and generators are functions of the run file and that state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.directory import steps
from drivetrain.checkpoint.run_state import verify
from drivetrain.config.engines import SINGLE
from drivetrain.config.load import load
from drivetrain.config.machine import Machine
from drivetrain.config.micro_batch_backoff import BOUNDS, again
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch, Window
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import restore_rng_state, rng_state
from drivetrain.errors import UserError, problem
from drivetrain.launch.group import group_of_one
from drivetrain.launch.variables import of_the_run, variables
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.runtime.hardware import detect
from drivetrain.runtime.library_messages import hush
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.tracking.events import Event, Warned
from drivetrain.tracking.jsonl import read_events
from drivetrain.training.anomalies import folder_of, read_trouble
from drivetrain.training.assemble import assemble
from drivetrain.training.auto_settings import compiling, order_of, total_steps_of
from drivetrain.training.inspect_step import Inspection, inspecting
from drivetrain.training.observed_steps import ObservedSteps
from drivetrain.training.progress import Progress
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.training.step_guard import Batch, end_if_stopped
from drivetrain.training.workload_rules import best_metric
from drivetrain.trust.named_code import refuse_named_code
from drivetrain.workloads.generating import MakesSamples

MOST_ALONE = 256  # samples of a micro-batch that are tried one by one
Say = Callable[[str], None]


@dataclass(frozen=True)
class Replay:
    """The result of a replay. recorded: loss and norm of the first time, if they were recorded."""

    step: int
    epoch: int
    start: str  # the state that it began from
    same_layout: bool
    loss: float
    grad_norm: float
    recorded: tuple[float, float] | None
    samples: list[int]
    micro_batches: list[list[int]]
    guilty: list[int] | None  # samples that give no finite loss each by itself; None: not tried
    made_at: int | None  # the step after which the model made the samples; None: they are of the data
    inspection: Inspection
    shown: dict[int, str]  # samples for the eye

    @property
    def repeated(self) -> bool | None:
        """Returns whether loss and norm are those of the first time, to the bit."""
        return None if self.recorded is None else all(map(_same, self.recorded, (self.loss, self.grad_norm)))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def replay(path: Path, step: int, say: Say, trust: bool = False) -> Replay:
    """Repeats a step. Raises UserError if the folder holds no run or no such step, or names Python that is not
    trusted."""
    hush()
    folder = RunFolder(path)
    first, machine = _run_of(folder)
    untracked = first.tracking.model_copy(update={"trackers": []})  # no tracker receives a replay
    refuse_named_code(first.model_copy(update={"tracking": untracked}), path, trust)
    run = on_one_process(first).model_copy(update={"output": path})
    with (
        variables(of_the_run(run, machine.device)),
        group_of_one(run.engine.traits.spreads),
        arithmetic(run.precision_spec, machine),
    ):
        return _Replayer(first, run, machine, folder, say).replayed(step)


def on_one_process(run: RunConfig) -> RunConfig:
    """The same training in one process: the same batches, cut as before as far as one process can."""
    batch = {"batch_size": run.global_batch, "batch_size_per_device": None}
    share = math.ceil(run.step_samples / run.data_parallel_size)
    # one process cuts by itself as it did, by a bound in tokens that the run file may not name
    is_same = run.data_parallel_size == 1 and run.micro_batch_limit is None
    cut = {"micro_batch_size": None if is_same else min(run.micro_batch, share)}
    alone = {"engine": SINGLE, "processes": None, "nodes": 1}
    plain = {"compile": False, "loader": run.loader.model_copy(update={"workers": 0})}
    return run.model_copy(update={**batch, **cut, **alone, **plain})


def _run_of(folder: RunFolder) -> tuple[RunConfig, Machine]:
    if not folder.run_file.is_file():
        raise problem("RUN", f"{folder.path} holds no run.yaml", "give the folder of a run, e.g. runs/digits")
    run, problems = load(folder.run_file)
    if run is None or problems:
        raise UserError(problems)
    return run, detect(run.device)


class _Replayer:
    def __init__(self, first: RunConfig, run: RunConfig, machine: Machine, folder: RunFolder, say: Say) -> None:
        """first: the run as it was trained; run: the same run as it is computed here."""
        self._first, self._run, self._machine, self._folder, self._say = first, run, machine, folder, say

    def replayed(self, step: int) -> Replay:
        run, ranks = self._run, Communicator()
        self._workload, self._engine = assemble(run, self._machine, ranks, training=True)
        self._order = order_of(run, self._workload)
        total = total_steps_of(run, self._order)
        if not 1 <= step <= total:
            raise problem("--step", f"{step} was given, and the run has {total} steps", f"give 1 to {total}")
        try:
            progress, start = self._started(step, ranks)
            noted = read_trouble(self._folder.trouble, step) or {}
            cut = on_one_process(again(self._first, noted.get("reduction") or progress.reduction))
            self._run = self._run.model_copy(update={name: getattr(cut, name) for name in BOUNDS})
            steps = ObservedSteps(self._run, self._machine, self._workload, self._engine, self._order)
            if progress.step < step - 1:
                self._say(f"going forward from step {progress.step} to {step - 1}")
                steps.go(progress, step - 1, troubled=end_if_stopped)
            return self._looked_at(progress, step, steps, start)
        finally:
            self._engine.close()

    # --- to the step -------------------------------------------------------------------------------------------------

    def _started(self, step: int, communicator: Communicator) -> tuple[Progress, str]:
        """Returns the newest state before the step: one kept after an anomaly, a checkpoint, or the beginning of the
        run."""
        metric, number = best_metric(self._run, self._workload), self._workload.train
        checkpoints = RunCheckpoints(
            self._folder.checkpoints, self._run, self._engine, communicator, metric, number, self._tell
        )
        kept = steps(self._folder.checkpoints) + steps(folder_of(self._folder.trouble, step))
        for path in sorted((path for path in kept if _step_of(path) < step), key=_step_of, reverse=True):
            wrong = verify(path)
            if not wrong:
                self._say(f"starting from {path}")
                return checkpoints.restore_from(path), str(path)
            self._say(f"{path} is passed over: {'; '.join(wrong)}")
        self._say("no checkpoint is from before it: starting from the beginning")
        return Progress(), "the beginning"

    def _tell(self, event: Event) -> None:
        if isinstance(event, Warned):
            self._say(event.message)

    @property
    def _was_compiled(self) -> bool:
        return compiling(self._first, self._machine, self._workload, training=True).what is not False

    # --- the step ----------------------------------------------------------------------------------------------------

    def _looked_at(self, progress: Progress, step: int, steps: ObservedSteps, start: str) -> Replay:
        seen: list[tuple[Window, list[list[int]], list[int] | None]] = []
        with ExitStack() as hooks:
            inspection = hooks.enter_context(inspecting(self._workload))

            def look(window: Window) -> None:
                hooks.close()  # samples are tried one by one before the update, and uninspected
                pieces = Batch.of(window).pieces
                seen.append((window, pieces, self._guilty(inspection, window, pieces)))

            [(loss, norm)] = steps.go(progress, step, look)
        [(window, pieces, guilty)] = seen
        to_show = guilty or window.indices.tolist()
        return Replay(
            step=step,
            epoch=window.epoch,
            start=start,
            same_layout=self._run.engine == self._first.engine and not self._was_compiled,
            loss=loss,
            grad_norm=norm,
            recorded=recorded(self._folder, step),
            samples=window.indices.tolist(),
            micro_batches=pieces,
            guilty=guilty,
            inspection=inspection,
            made_at=window.made_at,
            shown={index: self._workload.shown(self._sample(window, index)) for index in to_show[:3]},
        )

    def _guilty(self, inspection: Inspection, window: Window, pieces: list[list[int]]) -> list[int] | None:
        """Returns the samples of the bad micro-batch whose own loss is not finite, evaluated one by one."""
        if inspection.micro_batch is None or inspection.micro_batch >= len(pieces):
            return None
        found = []
        for index in pieces[inspection.micro_batch][:MOST_ALONE]:
            with _undisturbed():
                batch = self._workload.collate([self._sample(window, index)])
                alone = self._engine.evaluate([MicroBatch(batch)], {})
            if not math.isfinite(alone["loss"]):
                found.append(index)
        return found

    def _sample(self, window: Window, index: int) -> Any:
        if isinstance(self._workload, MakesSamples):
            return self._workload.made[index]
        return self._workload.train.load(index, window.epoch)


@contextmanager
def _undisturbed() -> Iterator[None]:
    state = rng_state()
    yield
    restore_rng_state(state)


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("step-")[2].split(".")[0])


def recorded(folder: RunFolder, step: int) -> tuple[float, float] | None:
    """Returns loss and norm that the run recorded for a step, in an anomaly's files or as a point of the curve."""
    noted = read_trouble(folder.trouble, step)
    if noted is not None:
        return float(noted["loss"]), float(noted["grad_norm"])
    file = folder.path / "events.jsonl"
    for event in read_events(file) if file.is_file() else ():
        if event["event"] == "step" and event["step"] == step:
            return float(event["loss"]), float(event["grad_norm"])
    return None


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
