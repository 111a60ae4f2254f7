"""The functions through which the loop reaches what it does not know: evaluation, disk, listeners, meters, signals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.data.loader import MicroBatch, Window
from drivetrain.errors import OutOfMemory
from drivetrain.measure.meters import Meters
from drivetrain.memory.shortage import LESS
from drivetrain.tracking.events import Event
from drivetrain.training.progress import Progress
from drivetrain.training.step_guard import Anomaly, end_if_stopped
from drivetrain.workloads.base import BestMetric


def no_look(_: Window) -> None:
    """Leaves gradients alone: a training has no use for them but the update."""


def uncut(progress: Progress, samples: int) -> Iterator[Window]:
    raise OutOfMemory(f"step {progress.step + 1}: out of memory with {samples} sample(s) at once: try {LESS}")


@dataclass(frozen=True)
class LoopHooks:
    """The functions that the loop calls without knowing what is behind them: evaluation data, disk, listeners, meters,
    signals."""

    evaluate: Callable[[], dict[str, float]] | None
    save: Callable[[Progress], None]
    send: Callable[[Event], None]
    stop: Callable[[], bool]  # asked once a step, the same answer on all ranks
    best_metric: BestMetric
    meters: Meters
    generate: Callable[[], list[dict[str, Any]]] | None = None  # prompts answered, at each evaluation
    score: Callable[[list[dict[str, Any]]], dict[str, float]] = lambda _: {}  # metrics of these answers
    troubled: Callable[[Anomaly], None] = end_if_stopped  # called by all ranks; raises if the run cannot go on
    # of samples that are this rank's alone to count; None where they have none
    tokens: Callable[[Sequence[MicroBatch]], int | None] = lambda _: None
    source: Literal["data", "answers"] = "data"  # of windows: read, or made by the model and rewarded
    rank: int = 0
    world: int = 1
    look: Callable[[Window], None] = no_look  # by all ranks, when the gradients are there and the update is not made
    after_step: Callable[[int], None] = lambda _: None  # garbage is collected here
    # the windows that follow in smaller micro-batches, since one of so many samples does not fit; raises if none would
    cut_smaller: Callable[[Progress, int], Iterator[Window]] = uncut
