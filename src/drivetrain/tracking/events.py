"""The one typed stream of events that progress, files, TensorBoard and users' trackers read."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

MOST_SHARES = 32  # ranks whose utilisation stands in a point: a thousand would be most of the file


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
    tokens: int | None = None  # so far, padding left out; None if samples have none
    terms: dict[str, float] = field(default_factory=dict)  # of a loss of several terms, the mean of each, unweighted
    memory: dict[str, int] = field(default_factory=dict)  # bytes: allocated and reserved of a GPU, resident on a CPU
    utilisation: float | None = None  # of the device, 0 to 1
    # of the first MOST_SHARES ranks each one's device, NaN where it is not known; of a CPU each process's share of its
    # cores
    utilisation_by_rank: list[float] = field(default_factory=list)
    seconds_by_part: dict[str, float] = field(default_factory=dict)  # data, forward, ...

    def as_dict(self) -> dict[str, Any]:
        """Leaves out the terms if the loss has only one, and what was not measured."""
        found = super().as_dict()
        optional = ("tokens", "terms", "memory", "utilisation", "utilisation_by_rank", "seconds_by_part")
        return {name: value for name, value in found.items() if name not in optional or value not in ({}, [], None)}


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
Reader = Callable[[Any], Any]
_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}  # as JSON has them, which lacks these


def well_formed(found: Any) -> dict[str, Any] | None:
    """Returns an event that was read from JSON, its fields of their types; None if it is no event of a run."""
    kind = found.get("event") if isinstance(found, dict) else None
    readers = _READERS.get(kind) if isinstance(kind, str) else None
    if readers is None:
        return None
    values = dict(found)
    try:
        for name, read, is_required in readers:
            if name in found:
                values[name] = read(found[name])
            elif is_required:
                return None
    except (TypeError, OverflowError):
        return None
    return values


def _reader(hint: Any) -> Reader:
    """Returns a function of a value as a field of this type holds it. It raises TypeError for one of another type.

    Made once for each field: a long curve has a million values, and looking a type up takes longer than reading one.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:  # X | None
        present = _reader(inner[0])
        return lambda value: None if value is None else present(value)
    if origin is list:
        each = _reader(inner[0])
        return lambda value: [each(item) for item in _of(list, value)]
    if origin is dict:
        each = _reader(inner[1])
        return lambda value: {key: each(item) for key, item in _of(dict, value).items()}
    if hint is float:
        return _number
    return (lambda value: value) if hint is Any else functools.partial(_of, hint)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:  # True is no number
        raise TypeError(kind)
    return value


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    number = _NUMBERS.get(value, value) if isinstance(value, str) else value
    return float(number if type(number) is float else _of(int, number))


def _readers(event: type[Event]) -> list[tuple[str, Reader, bool]]:
    """Returns the fields of a kind of event: name, how it is read, and whether every such event has it."""
    hints = get_type_hints(event)
    return [
        (each.name, _reader(hints[each.name]), each.default is MISSING and each.default_factory is MISSING)
        for each in fields(event)
    ]


_READERS = {event.kind: _readers(event) for event in EVENTS}


class Tracker(ABC):
    """Receives the events of a run. A user's tracker is a subclass named by import path; it is made with the run
    folder."""

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Called for each event, in order, on the first rank only."""

    @abstractmethod
    def close(self) -> None:
        """Called once, also when the run fails."""
