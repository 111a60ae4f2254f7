"""The training loop. It names no engine, no precision and no tracker.

A step is one attempt at an optimizer update: a window of micro-batches forward and backward, then the update. A run
takes as many steps as its length says, each a global batch of its own, whether or not their updates are made; the
schedule follows the updates, and ends with the last step (schedules.py). Losses and gradient norms stay on the device
until the next point of the curve; only then are they read and reported. An update whose gradients are not finite is
still refused at once (step_guard.py).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.best_evaluation import gain
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import Window
from drivetrain.distributed.rng import restore_mark, rng_mark
from drivetrain.engines.base import Engine, StepGuard, StepResult
from drivetrain.errors import OutOfMemory, RunError, Stopping
from drivetrain.memory.shortage import room_for
from drivetrain.memory.statistics import Statistics
from drivetrain.optim.schedules import lr_factor
from drivetrain.tracking.events import Evaluated, Generated
from drivetrain.training.curve import Curve
from drivetrain.training.hooks import LoopHooks
from drivetrain.training.progress import Progress
from drivetrain.training.report import Status
from drivetrain.training.step_guard import Batch, PendingNumbers, Watch
from drivetrain.workloads.base import BestMetric

# what becomes a window → how an error calls the work, and what takes less memory in it
WORK = {
    "data": ("reading the samples", "give fewer or no loader.workers, a smaller loader.prefetch or shorter samples"),
    "answers": ("drawing and rewarding answers", "give a smaller micro_batch_size, or shorter prompts or answers"),
}


def train(
    engine: Engine,
    windows: Iterator[Window],
    run: RunConfig,
    total_steps: int,
    steps_per_epoch: float,
    progress: Progress,
    around: LoopHooks,
) -> Status:
    """Runs from progress.step to total_steps. Progress is kept up to date in place.

    stopped_early: patience had run out, so that a run that is resumed after it ended early takes no further step.
    """
    factor = lr_factor(run.schedule, total_steps)
    watch = Watch(run.numerics, run.precision_spec.scaled, progress.recent, engine.summed)
    curve = Curve(run, engine, progress, steps_per_epoch, around, watch)
    meters, before, start = around.meters, progress.elapsed_seconds, time.perf_counter()

    def elapsed() -> float:
        return before + time.perf_counter() - start

    while progress.step < total_steps:
        if _patience_is_over(run, progress):
            return "stopped_early"
        mark = rng_mark()
        meters.begin(progress.step + 1)
        window = _following(windows, around)
        if window is None:
            curve.flush(elapsed)
            if progress.step > progress.last_save:
                _save(progress, around)
            return "interrupted"
        meters.batch(window.indices)
        judge = functools.partial(watch.judge, progress.step + 1)
        made = _made(engine, window, around, lambda: factor(*curve.settled().counts), judge, mark)
        if made is None:
            curve.settled()
            windows = around.cut_smaller(progress, window.largest)
            continue
        loss, result, lr_now = made
        was = replace(progress)
        progress.step += 1
        progress.samples += len(window.indices)
        pending = PendingNumbers(progress.step, Batch.of(window), loss, result, mark, was, engine.term_shares)
        curve.add(pending, lr_now, around.tokens(window.micro_batches))
        progress.elapsed_seconds = elapsed()
        due = _due(run, progress, total_steps, steps_per_epoch, around)
        if due.any or progress.step % run.tracking.log_every == 0:
            curve.flush(elapsed, len(window.indices))
        elif watch.refused(progress.step):
            curve.read()
        _evaluate_and_save(engine, run, progress, around, due)
        progress.elapsed_seconds = elapsed()
        meters.step_done(len(window.indices))
        around.after_step(progress.step)
        if due.stop and progress.step < total_steps:
            return "interrupted"
    return "completed"


def _following(windows: Iterator[Window], around: LoopHooks) -> Window | None:
    """Returns the next window; None where a signal ended the wait for it, and the run is as it was before."""
    what, fix = WORK[around.source]
    try:
        with around.meters.part(around.source), room_for(what, fix=fix):
            return next(windows)
    except Stopping:
        return None


def _made(
    engine: Engine,
    window: Window,
    around: LoopHooks,
    rate: Callable[[], float],
    judge: Callable[[Tensor], StepGuard],
    mark: Any,
) -> tuple[Tensor, StepResult, float] | None:
    """Returns the window's loss and update, and the factor of its learning rate; None if memory ran out before the
    update, and the state is that of `mark`.

    rate: returns the factor. It may wait for the step before, and is called once this step's window is queued behind
    that. Raises OutOfMemory if an engine cannot undo the window.
    """
    undo = engine.savepoint()
    engine.statistics.keep()
    try:
        with around.meters.step(window.micro_batches):
            with room_for(f"micro-batches of {window.largest} sample(s)", window.largest):
                loss = engine.forward_backward(window.micro_batches)
            around.look(window)
            with around.meters.part("optimizer"), room_for("the optimizer's step"):
                factor = rate()
                return loss, engine.optimizer_step(factor, _putting_back(engine.statistics, judge(loss))), factor
    except OutOfMemory as shortage:
        if undo is None or not shortage.samples:
            raise
    undo()
    restore_mark(mark)
    return None


def _putting_back(statistics: Statistics, judge: StepGuard) -> StepGuard:
    """Returns a judge that also restores BatchNorm's statistics if the update is refused."""

    def judged(norm: Tensor) -> bool | Tensor:
        refused = judge(norm)
        statistics.put_back(refused)
        return refused

    return judged


@dataclass(frozen=True)
class Due:
    evaluation: bool
    save: bool
    stop: bool

    @property
    def any(self) -> bool:
        return self.evaluation or self.save or self.stop


def _due(run: RunConfig, progress: Progress, total_steps: int, steps_per_epoch: float, around: LoopHooks) -> Due:
    step, at_end = progress.step, progress.step == total_steps
    stop = around.stop()
    every = run.evaluation.every_steps or run.evaluation.every_epochs * steps_per_epoch
    evaluation = around.evaluate is not None and (at_end or step % every == 0) and not (stop and not at_end)
    on_cadence = step % run.checkpoints.every_steps == 0 if run.checkpoints.every_steps else step % every == 0
    return Due(evaluation, save=at_end or stop or on_cadence, stop=stop)


def _evaluate_and_save(engine: Engine, run: RunConfig, progress: Progress, around: LoopHooks, due: Due) -> None:
    """Does what is due after a step."""
    if due.evaluation:
        _evaluate_or_save(engine, run, progress, around)
    if due.save or _patience_is_over(run, progress):
        _save(progress, around)


def _evaluate_or_save(engine: Engine, run: RunConfig, progress: Progress, around: LoopHooks) -> None:
    """Evaluates or saves: saves first if an evaluation fails or does not fit in memory, unless other ranks may be
    elsewhere."""
    try:
        _evaluate(run, progress, around)
    except Exception:
        if engine.is_alone:
            _save(progress, around)
        raise


def _evaluate(run: RunConfig, progress: Progress, around: LoopHooks) -> None:
    assert around.evaluate is not None
    start = time.perf_counter()
    less = "give a smaller evaluation.batch_size"
    with around.meters.part("evaluation"), room_for("the evaluation", fix=less):
        progress.metrics = around.evaluate()
    seconds = time.perf_counter() - start
    samples = None
    if around.generate is not None:
        with around.meters.part("samples"):
            samples = around.generate()
            progress.metrics |= around.score(samples)
    metric = around.best_metric
    value = progress.metrics.get(metric.name)  # None: no answer has a reward, of which the evaluation warns
    if value is not None and not math.isfinite(value):
        raise RunError(f"step {progress.step}: the evaluation's {metric.name} is {value}")
    progress.last_evaluation = progress.step
    is_best = value is not None and _is_best(run, progress, metric, value)
    around.send(Evaluated(step=progress.step, metrics=progress.metrics, seconds=seconds, best=is_best))
    if samples is not None:
        around.send(Generated(step=progress.step, samples=samples))


def _is_best(run: RunConfig, progress: Progress, metric: BestMetric, value: float) -> bool:
    """Returns whether the evaluation is the best so far. Keeps that, and how long there was no gain, in progress."""
    stopping = run.evaluation.early_stopping
    gained = gain(value, None if progress.best is None else progress.best["value"], metric.higher_is_better)
    if gained > 0:
        progress.best = {"step": progress.step, "metric": metric.name, "value": value}
    enough = gained > (stopping.min_delta if stopping else 0.0)
    progress.evaluations_without_gain = 0 if enough else progress.evaluations_without_gain + 1
    return gained > 0


def _patience_is_over(run: RunConfig, progress: Progress) -> bool:
    stopping = run.evaluation.early_stopping
    return stopping is not None and progress.evaluations_without_gain >= stopping.patience


def _save(progress: Progress, around: LoopHooks) -> None:
    with around.meters.part("save"), room_for("a save"):
        around.save(progress)
    progress.last_save = progress.step
