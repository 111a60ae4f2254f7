"""Checks that a checkpoint of a run holds, beside whole files, the parts, fields and types that a run needs.

A checksum proves that a file is as it was written, not that a run could go on from it: the writer of a file can write
its checksum too. So before a checkpoint is restored, its trees are decoded over the tensors' headers and looked
through.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.checkpoint import directory
from drivetrain.checkpoint.directory import read_manifest, read_part
from drivetrain.checkpoint.state import State, join
from drivetrain.checkpoint.tensor_file import DTYPES
from drivetrain.runtime.storage import local_file

PARTS = ("model", "optimizer", "training")
OF_WEIGHTS = ("model", "auxiliary")  # what evaluating and predicting read
SHOWN = 3
Count = Annotated[int, Field(ge=0)]
Bound = Annotated[int, Field(gt=0)] | None
UNREADABLE = (ValueError, LookupError, TypeError, RuntimeError, RecursionError, SafetensorError)
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


class Recent(_Strict):
    losses: list[float] = []
    norms: list[float] = []
    skips: list[Count] = []


class Best(_Strict):
    step: Count
    metric: str = ""
    value: float


class Bounds(_Strict):
    micro_batch_size: Bound | str
    micro_batch_tokens: Bound


class Reduction(_Strict):
    of: Bounds
    to: Bounds


class Progress(_Strict):
    """The loop's Progress. Fields that older checkpoints lack have a default."""

    step: Count
    updates: Count
    samples: Count
    elapsed_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    metrics: dict[str, float]
    best: Best | None
    evaluations_without_gain: Count
    last_evaluation: int
    last_save: Count
    tokens: Count = 0
    recent: Recent = Recent()
    terms: dict[str, float] = {}
    reduction: Reduction | None = None
    by_set: dict[str, dict[str, float]] = {}


class Order(_Strict):
    seed: int
    batch_size: int
    num_samples: int
    stream: str | None = None  # files and settings of a stream
    mixture: str | None = None  # how data sets are drawn


class Scaler(BaseModel):
    model_config = ConfigDict(strict=True)

    scale: Annotated[float, Field(gt=0)]
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: Annotated[int, Field(alias="_growth_tracker")]


class EngineState(_Strict):
    scaler: dict[str, Any]


class Training(_Strict):
    progress: Progress
    generators: Annotated[list[dict[str, Any]], Field(min_length=1)]
    streams: list[int] | None = None
    engine: EngineState
    order: Order
    optimizer: str | None = None
    length: str | None = None
    beside: dict[str, Any] | None = None  # auxiliary models' origin, the workload's own state
    data: Any = None  # the state of a user's stream


class Group(BaseModel):
    model_config = ConfigDict(strict=True)

    params: list[str]


class Optimizer(_Strict):
    state: dict[str, dict[str, Any]]
    param_groups: list[Group]


class Model(_Strict):
    weights: dict[str, Tensor]


def verify(path: Path) -> list[str]:
    """Returns what is wrong with a run's checkpoint; empty if a run can go on from it."""
    return directory.verify(path) or list(problems(path))


def verify_weights(path: Path) -> list[str]:
    """Returns what is wrong with the weights of a run's checkpoint; empty if a model can be filled with them. The
    optimizer's state, twice their size, is not read."""
    wrong = directory.verify(path, OF_WEIGHTS)
    if wrong:
        return wrong
    try:
        Model(weights=outline(path, "model"))
    except ValidationError as error:
        return [_formatted(error)]
    except UNREADABLE as error:
        return [_unreadable(error)]
    return []


def problems(path: Path) -> Iterator[str]:
    """Yields why restoring a checkpoint would fail whose files are as its manifest states."""
    manifest = read_manifest(path)
    lacking = [name for name in PARTS if name not in manifest.parts]
    if lacking:
        yield f"it lacks the part {', '.join(lacking)}"
        return
    try:
        parts = {"model": outline(path, "model"), "optimizer": outline(path, "optimizer")}
        training = read_part(path, "training")
        Model(weights=parts["model"])
        Optimizer.model_validate(parts["optimizer"])
        found = Training.model_validate(training)
        if found.engine.scaler:
            Scaler.model_validate(found.engine.scaler)
    except ValidationError as error:
        yield _formatted(error)
        return
    except UNREADABLE as error:
        yield _unreadable(error)
        return
    yield from _disagreements(found, manifest.step)


def _unreadable(error: Exception) -> str:
    return f"its parts cannot be read: {type(error).__name__}: {error}"


def outline(path: Path, name: str) -> State:
    """Returns a part with tensors that have no numbers, from the header and the tree alone."""
    with safe_open(local_file(path, f"{name}.safetensors"), "pt") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118  it is no dict
        tensors = {
            key: torch.empty(each.get_shape(), dtype=_DTYPES[each.get_dtype()], device="meta")
            for key, each in slices.items()
        }
    return join(tensors, json.loads(local_file(path, f"{name}.json").read_text(encoding="utf-8")))


def _disagreements(training: Training, step: int) -> Iterator[str]:
    """Yields problems beyond each field's type."""
    if training.progress.step != step:
        yield f"training.progress is of step {training.progress.step}, and the manifest of step {step}"
    if training.progress.updates > training.progress.step:
        yield f"training.progress has {training.progress.updates} updates in {training.progress.step} steps"
    if training.streams is not None and len(training.streams) != len(training.generators):
        yield f"training has {len(training.generators)} generators of {len(training.streams)} streams"
    for rank, state in enumerate(training.generators):
        if (wrong := _wrong_generator(state)) is not None:
            yield f"training.generators.{rank} cannot be restored: {wrong}"


def _wrong_generator(state: dict[str, Any]) -> str | None:
    """Tries the state on unused generators."""
    try:
        python, numpy = state["python"], state["numpy"]
        random.Random().setstate((python["version"], tuple(python["words"]), python["gauss"]))
        keys = numpy["keys"].numpy().astype(np.uint32)
        fields = (numpy["position"], numpy["has_gauss"], numpy["cached"])
        np.random.RandomState().set_state((numpy["name"], keys, *fields))
        torch.Generator().set_state(state["torch"])
        wrong = [each for each in state["cuda"] if each.dtype != torch.uint8 or each.numel() not in (8, 16)]
    except Exception as error:  # each generator refuses in its own way
        return f"{type(error).__name__}: {error}"
    return "a state of a GPU's generator has another size" if wrong else None


def _formatted(error: ValidationError) -> str:
    """Formats pydantic's errors as a line."""
    found = error.errors(include_input=False, include_url=False)
    part = error.title.lower()
    faults = [f"{'.'.join([part, *map(str, each['loc'])])}: {each['msg'].lower()}" for each in found[:SHOWN]]
    return "; ".join(faults) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
