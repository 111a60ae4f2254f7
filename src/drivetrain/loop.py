"""The training loop. It names no engine, no precision and no tracker.

A step is one optimizer update tried: a window of micro-batches forward and backward, then the update. Losses and
gradient norms stay on the device until the next point of the curve; only then are they read, checked and told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.config.run import RunConfig
from drivetrain.data.loader import Window
from drivetrain.engines.base import Engine, StepResult
from drivetrain.errors import RunError
from drivetrain.measure.meters import Meters
from drivetrain.optim import lr_factor
from drivetrain.report import Status
from drivetrain.tracking.events import Evaluated, Event, Generated, StepDone
from drivetrain.workloads.base import BestMetric

SMALLEST_SCALE = 2.0**-24  # below it the loss scale says that gradients are not finite for another reason


@dataclass
class Progress:
    """How far the run is: what a checkpoint keeps beside the engine's state."""

    step: int = 0
    updates: int = 0  # steps that were not skipped
    samples: int = 0
    elapsed_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    evaluations_without_gain: int = 0
    last_evaluation: int = 0
    last_save: int = 0

    @property
    def skipped(self) -> int:
        return self.step - self.updates


@dataclass(frozen=True)
class Surroundings:
    """What the loop calls and does not know: evaluation data, disk, listeners, meters, signals."""

    evaluate: Callable[[], dict[str, float]] | None
    save: Callable[[Progress], None]
    send: Callable[[Event], None]
    stop: Callable[[], bool]  # asked once a step, the same answer on all ranks
    best_metric: BestMetric
    meters: Meters
    generate: Callable[[], list[dict[str, Any]]] | None = None  # prompts answered, after each evaluation


@dataclass(frozen=True)
class Pending:
    """A step whose numbers have not been read yet."""

    step: int
    indices: np.ndarray
    loss: Tensor  # this rank's share
    result: StepResult


def train(
    engine: Engine,
    windows: Iterator[Window],
    run: RunConfig,
    total_steps: int,
    steps_per_epoch: int,
    progress: Progress,
    around: Surroundings,
) -> Status:
    """Run from progress.step to total_steps. Progress is kept up to date in place."""
    factor = lr_factor(run.schedule, total_steps)
    curve = Curve(run, engine, progress, steps_per_epoch, around)
    meters, before, start = around.meters, progress.elapsed_seconds, time.perf_counter()
    while progress.step < total_steps:
        with meters.part("data"):
            window = next(windows)
        with meters.step(window.micro_batches):
            loss = engine.forward_backward(window.micro_batches)
            with meters.part("optimizer"):
                lr_now = factor(progress.updates)
                result = engine.optimizer_step(lr_now)
        progress.step += 1
        progress.updates += not result.skipped
        progress.samples += len(window.indices)
        curve.add(Pending(progress.step, window.indices, loss, result), lr_now)
        progress.elapsed_seconds = before + time.perf_counter() - start
        due = _due(run, progress, total_steps, steps_per_epoch, around)
        if due.any or progress.step % run.tracking.log_every == 0:
            curve.flush()
        if due.evaluation:
            _evaluate(run, progress, around)
        stopping = due.evaluation and _patience_is_over(run, progress)
        if due.save or stopping:
            _save(progress, around)
        progress.elapsed_seconds = before + time.perf_counter() - start
        meters.step_done(len(window.indices))
        if due.stop and progress.step < total_steps:
            return "interrupted"
        if stopping:
            return "stopped_early"
    return "completed"


@dataclass(frozen=True)
class Due:
    evaluation: bool
    save: bool
    stop: bool

    @property
    def any(self) -> bool:
        return self.evaluation or self.save or self.stop


def _due(run: RunConfig, progress: Progress, total_steps: int, steps_per_epoch: int, around: Surroundings) -> Due:
    step, at_end = progress.step, progress.step == total_steps
    stop = around.stop()
    every = run.evaluation.every_steps or run.evaluation.every_epochs * steps_per_epoch
    evaluation = around.evaluate is not None and (at_end or step % every == 0) and not (stop and not at_end)
    on_cadence = step % run.checkpoints.every_steps == 0 if run.checkpoints.every_steps else step % every == 0
    return Due(evaluation, save=at_end or stop or on_cadence, stop=stop)


class Curve:
    """Steps waiting to be read; a flush checks all of them and tells the newest."""

    def __init__(
        self, run: RunConfig, engine: Engine, progress: Progress, steps_per_epoch: int, around: Surroundings
    ) -> None:
        self._run, self._engine, self._progress = run, engine, progress
        self._steps_per_epoch, self._around = steps_per_epoch, around
        self._pending: list[Pending] = []
        self._factor = 0.0

    def add(self, pending: Pending, factor: float) -> None:
        self._pending.append(pending)
        self._factor = factor
        scale = pending.result.scale
        if scale is not None and scale < SMALLEST_SCALE:
            raise RunError(
                f"step {pending.step}: the loss scale fell to {scale:.1e} and the gradients still overflow. They are "
                "not finite for another reason than fp16's range: try precision=fp32, or a lower learning rate"
            )

    def flush(self) -> None:
        """One exchange and one transfer for all pending numbers.

        RunError names the first step whose loss or gradient is not finite.
        """
        if not self._pending:
            return
        losses = self._engine.summed(torch.stack([p.loss.float() for p in self._pending])).tolist()
        norms = torch.stack([p.result.grad_norm.float() for p in self._pending]).tolist()
        for pending, loss, norm in zip(self._pending, losses, norms, strict=True):
            _refuse_non_finite(pending, loss, norm)
        newest, progress, around = self._pending[-1], self._progress, self._around
        self._pending = []
        around.send(
            StepDone(
                step=newest.step,
                epoch=newest.step / self._steps_per_epoch,
                loss=losses[-1],
                grad_norm=norms[-1],
                lr=self._run.optimizer.lr * self._factor,
                scale=newest.result.scale,
                skipped_steps=progress.skipped,
                samples=progress.samples,
                samples_per_second=around.meters.recent_rate(),
                elapsed_seconds=progress.elapsed_seconds,
            )
        )


def _refuse_non_finite(pending: Pending, loss: float, norm: float) -> None:
    what = None
    if not math.isfinite(loss):
        what = f"the loss is {loss}"
    elif not math.isfinite(norm) and not pending.result.skipped:
        what = f"the gradient norm is {norm} though the loss ({loss:.4g}) is finite"
    if what is None:
        return
    shown = ", ".join(map(str, pending.indices[:16].tolist()))
    more = f" and {len(pending.indices) - 16} more" if len(pending.indices) > 16 else ""
    raise RunError(
        f"step {pending.step}: {what}. The batch holds training samples {shown}{more}. Nothing was saved after the "
        "last good checkpoint. Try a lower learning rate, a longer warm-up, loop.max_grad_norm=1, precision=fp32 or "
        "bf16-mixed, and look at these samples"
    )


def _evaluate(run: RunConfig, progress: Progress, around: Surroundings) -> None:
    assert around.evaluate is not None
    start = time.perf_counter()
    with around.meters.part("evaluation"):
        progress.metrics = around.evaluate()
    progress.last_evaluation = progress.step
    metric = around.best_metric
    value = progress.metrics[metric.name]
    if not math.isfinite(value):
        raise RunError(f"step {progress.step}: the evaluation's {metric.name} is {value}; nothing was saved after it")
    sign = 1.0 if metric.higher_is_better else -1.0
    stopping = run.evaluation.early_stopping
    gain = math.inf if progress.best is None else sign * (value - progress.best["value"])
    if gain > 0:
        progress.best = {"step": progress.step, "metric": metric.name, "value": value}
    enough = gain > (stopping.min_delta if stopping else 0.0)
    progress.evaluations_without_gain = 0 if enough else progress.evaluations_without_gain + 1
    seconds = time.perf_counter() - start
    around.send(Evaluated(step=progress.step, metrics=progress.metrics, seconds=seconds, best=gain > 0))
    if around.generate is not None:
        with around.meters.part("samples"):
            samples = around.generate()
        around.send(Generated(step=progress.step, samples=samples))


def _patience_is_over(run: RunConfig, progress: Progress) -> bool:
    stopping = run.evaluation.early_stopping
    return stopping is not None and progress.evaluations_without_gain >= stopping.patience


def _save(progress: Progress, around: Surroundings) -> None:
    with around.meters.part("save"):
        around.save(progress)
    progress.last_save = progress.step
