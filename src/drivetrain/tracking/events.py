"""The one typed stream of events that progress, files, TensorBoard and users' trackers read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    kind: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, with its kind."""
        return {"event": self.kind, **asdict(self)}


@dataclass(frozen=True)
class RunStarted(Event):
    kind: ClassVar[str] = "run_started"
    name: str
    output: str
    total_steps: int
    first_step: int  # 0, or the step the run resumed from
    samples_per_epoch: int
    facts: dict[str, Any] = field(default_factory=dict)  # precision, engine, device, model, data


@dataclass(frozen=True)
class StepDone(Event):
    """A point of the curve: sent at the logging cadence; `loss` is of this step, rates are since the last point."""

    kind: ClassVar[str] = "step"
    step: int  # optimizer steps tried so far, 1-based
    epoch: float
    loss: float
    grad_norm: float
    lr: float
    scale: float | None  # loss scale, if the precision has one
    skipped_steps: int  # so far
    samples: int  # so far
    samples_per_second: float
    elapsed_seconds: float


@dataclass(frozen=True)
class Evaluated(Event):
    kind: ClassVar[str] = "evaluation"
    step: int
    metrics: dict[str, float]
    seconds: float
    best: bool


@dataclass(frozen=True)
class Generated(Event):
    """Prompts answered at an evaluation: {"prompt", "answer", "reference"} each, the last perhaps None."""

    kind: ClassVar[str] = "samples"
    step: int
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Warned(Event):
    kind: ClassVar[str] = "warning"
    message: str


@dataclass(frozen=True)
class Troubled(Event):
    """A step whose loss or gradient spiked or was not finite."""

    kind: ClassVar[str] = "trouble"
    step: int
    trouble: str  # not_finite, spike
    action: str  # told, skipped, stopped
    message: str
    loss: float
    grad_norm: float
    usual_loss: float | None  # medians of the steps before
    usual_grad_norm: float | None
    samples: list[int]  # indices of the whole batch
    kept: str | None  # folder with what is needed to replay it


@dataclass(frozen=True)
class RunFinished(Event):
    kind: ClassVar[str] = "run_finished"
    status: str  # completed, stopped_early, interrupted, failed
    step: int
    message: str


class Tracker(ABC):
    """Listens to a run. A tracker of the user's is a subclass named by import path; it is made with the run folder."""

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Called for each event, in order, on the first rank only."""

    @abstractmethod
    def close(self) -> None:
        """Called once, also when the run fails."""
