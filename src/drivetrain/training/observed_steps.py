"""Takes steps of a run through its own loop for their numbers alone: `prove` compares them, `replay` looks into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import Window
from drivetrain.data.order import Order
from drivetrain.engines.base import Engine
from drivetrain.measure.meters import Meters
from drivetrain.measure.throughput import Stopwatch
from drivetrain.tracking.events import Event, StepDone
from drivetrain.training.auto_settings import total_steps_of
from drivetrain.training.batching import window_slice
from drivetrain.training.hooks import LoopHooks, no_look
from drivetrain.training.loop import train
from drivetrain.training.progress import Progress
from drivetrain.training.step_guard import Anomaly
from drivetrain.training.windows import source_of, windows_of
from drivetrain.training.workload_rules import best_metric
from drivetrain.workloads.base import Workload


def keep_nothing(_: Progress) -> None:
    """Saves nothing where the loop would save."""


@dataclass
class _Numbers:
    """Loss and gradient norm of each step, by its number; of refused steps too."""

    then: Callable[[Anomaly], None]  # gets each anomaly
    of: dict[int, tuple[float, float]] = field(default_factory=dict)

    def send(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.of[event.step] = event.loss, event.grad_norm

    def troubled(self, anomaly: Anomaly) -> None:
        self.of[anomaly.numbers.step] = anomaly.numbers.loss, anomaly.numbers.norm
        self.then(anomaly)


class ObservedSteps:
    """The loop of a run on an engine, without evaluations and listeners."""

    def __init__(
        self,
        run: RunConfig,
        machine: Machine,
        workload: Workload,
        engine: Engine,
        order: Order,
        stopwatch: Stopwatch | None = None,
        workers: bool = False,
    ) -> None:
        """stopwatch: times the loop's parts. workers: whether samples are loaded as in training; else in this process,
        where those who look on can count them."""
        self._run = run.model_copy(update={"tracking": run.tracking.model_copy(update={"log_every": 1})})
        self._machine, self._workload, self._engine, self._order = machine, workload, engine, order
        self._stopwatch, self._workers = stopwatch or Stopwatch(torch.device(machine.device)), workers
        self.total = total_steps_of(run, order)

    def go(
        self,
        progress: Progress,
        until: int,
        look: Callable[[Window], None] = no_look,
        after_step: Callable[[int], None] = lambda _: None,
        save: Callable[[Progress], None] = keep_nothing,
        troubled: Callable[[Anomaly], None] = lambda _: None,
    ) -> list[tuple[float, float]]:
        """Goes on from progress.step to `until`; returns loss and gradient norm of each step. All ranks call it.

        look: called when a step's gradients are there and its update is not made. save: called once, at the end.
        troubled: called at an anomaly, which ends nothing by itself: its update is refused, its numbers are returned.
        """
        if progress.step >= until:
            return []
        first, numbers = progress.step + 1, _Numbers(troubled)
        meters = Meters(self._machine, self._run.precision_spec, self._engine, False, self._stopwatch)
        around = LoopHooks(
            evaluate=None,
            save=lambda reached: save(reached) if reached.step == until else None,
            send=numbers.send,
            stop=lambda: progress.step >= until,
            best_metric=best_metric(self._run, self._workload),
            meters=meters,
            troubled=numbers.troubled,
            look=look,
            source=source_of(self._workload),
            after_step=after_step,
        )
        mine = window_slice(self._run, self._machine, self._workload, self._engine)
        steps = range(progress.step, until)
        windows = windows_of(self._run, self._workload, self._engine, self._order, steps, mine, workers=self._workers)
        with meters:
            train(self._engine, windows, self._run, self.total, self._order.steps_per_epoch, progress, around)
        return [numbers.of[step] for step in range(first, until + 1)]
