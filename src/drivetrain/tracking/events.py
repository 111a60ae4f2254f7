"""The one typed stream of events that progress, files, TensorBoard and users' trackers read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, asdict, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Event:
    kind: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Returns the event as JSON-able values, with its kind."""
        return {"event": self.kind, **asdict(self)}


@dataclass(frozen=True)
class RunStarted(Event):
    kind: ClassVar[str] = "run_started"
    name: str
    output: str
    total_steps: int
    first_step: int  # 0, or the step the run resumed from
    samples_per_epoch: int | None  # None: of a stream whose epochs flow into one another
    facts: dict[str, Any] = field(default_factory=dict)  # precision, engine, device, model, data


@dataclass(frozen=True)
class StepDone(Event):
    """A point of the curve: sent at the logging cadence; `loss` is of this step, rates are since the last point.

    What the device did is that of rank 0, whose events these are, since the last point.
    """

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
    terms: dict[str, float] = field(default_factory=dict)  # of a loss of several terms, the mean of each, unweighted
    memory: dict[str, int] = field(default_factory=dict)  # bytes: allocated and reserved of a GPU, resident on a CPU
    utilisation: float | None = None  # of the device, 0 to 1
    seconds_by_part: dict[str, float] = field(default_factory=dict)  # data, forward, ...

    def as_dict(self) -> dict[str, Any]:
        """Leaves out the terms if the loss has only one, and what was not measured."""
        found = super().as_dict()
        optional = ("terms", "memory", "utilisation", "seconds_by_part")
        return {name: value for name, value in found.items() if name not in optional or value not in ({}, None)}


@dataclass(frozen=True)
class Evaluated(Event):
    kind: ClassVar[str] = "evaluation"
    step: int
    metrics: dict[str, float]
    seconds: float
    best: bool


@dataclass(frozen=True)
class EvaluationProgress(Event):
    """Sent about once a second during an evaluation that takes longer. events.jsonl leaves it out."""

    kind: ClassVar[str] = "evaluating"
    step: int
    done: int  # samples
    total: int


@dataclass(frozen=True)
class MixtureEvaluated(Event):
    """Sent with an evaluation: for each data set {"name", "samples", "share"} of the training so far, and its loss and
    metrics where it has evaluation data of its own."""

    kind: ClassVar[str] = "mixture"
    step: int
    sets: list[dict[str, Any]]


@dataclass(frozen=True)
class Generated(Event):
    """Prompts answered at an evaluation: {"prompt", "answer", "reference"} each, the last perhaps None; where the model
    is held to a reference that can answer, "reference_model": its answer."""

    kind: ClassVar[str] = "samples"
    step: int
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class RolledOut(Event):
    """Answers of the model and their rewards, made for the steps after `step`: means over all, and each answer, which
    events.jsonl leaves out (samples.jsonl has them)."""

    kind: ClassVar[str] = "rollout"
    step: int
    metrics: dict[str, float]
    samples: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().as_dict().items() if name != "samples"}


@dataclass(frozen=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CheckpointUploaded(Event):
    """A checkpoint is complete in the run's mirror. path: its address."""

    kind: ClassVar[str] = "upload"
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
    """An anomaly: a step whose loss or gradient spiked or was not finite."""

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


EVENTS: tuple[type[Event], ...] = (
    *(RunStarted, StepDone, EvaluationProgress, Evaluated, MixtureEvaluated, Generated, RolledOut),
    *(CheckpointSaved, CheckpointUploaded, Warned, Troubled, RunFinished),
)
_HINTS = {event.kind: get_type_hints(event) for event in EVENTS}
_FIELDS = {event.kind: fields(event) for event in EVENTS}
_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}  # as JSON has them, which lacks these


def well_formed(found: Any) -> dict[str, Any] | None:
    """Returns an event that was read from JSON, its fields of their types; None if it is no event of a run."""
    kind = found.get("event") if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        return None
    values = dict(found)
    try:
        for each in _FIELDS[kind]:
            if each.name in found:
                values[each.name] = _typed(found[each.name], _HINTS[kind][each.name])
            elif each.default is MISSING and each.default_factory is MISSING:
                return None
    except (TypeError, OverflowError):
        return None
    return values


def _typed(value: Any, hint: Any) -> Any:
    """Returns the value as a field of this type holds it. Raises TypeError for another type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:  # X | None
        return None if value is None else _typed(value, inner[0])
    if origin is list and isinstance(value, list):
        return [_typed(item, inner[0]) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _typed(item, inner[1]) for key, item in value.items()}
    if hint is float:
        number = _NUMBERS.get(value, value) if isinstance(value, str) else value
        if type(number) in (int, float):
            return float(number)
    elif hint is Any or type(value) is hint:
        return value
    raise TypeError(hint)


class Tracker(ABC):
    """Receives the events of a run. A user's tracker is a subclass named by import path; it is made with the run
    folder."""

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Called for each event, in order, on the first rank only."""

    @abstractmethod
    def close(self) -> None:
        """Called once, also when the run fails."""
