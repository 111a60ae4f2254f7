"""How a run is trained: optimizer, schedule, length, evaluation, saving, tracking."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from drivetrain.config.base import Frozen, doc
from drivetrain.config.optimizers import KINDS, OptimizerKind, kind_of

IMPORT_PATH = r"[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*"


def _optimizer(name: str) -> str:
    """Returns one of KINDS, or an import path. Raises ValueError for a text that is neither."""
    return _known_or_path(name, list(KINDS), "Class")


def _known_or_path(name: str, known: Sequence[str], kind: str) -> str:
    if name in known or re.fullmatch(IMPORT_PATH, name):
        return name
    near = difflib.get_close_matches(name[:40], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"known: {', '.join(known)}; others as package.module:{kind}{hint}")


def _names(fuses: bool) -> str:
    return ", ".join(name for name, kind in KINDS.items() if kind.fuses is fuses)


class Optimizer(Frozen):
    name: Annotated[str, AfterValidator(_optimizer)] = doc(
        f"{_names(fuses=True)}; with a smaller state (docs/reference/optimizers.md) {_names(fuses=False)}; or an "
        "optimizer class's import path "
        "(package.module:Class)",
        "adamw",
    )
    lr: float = doc("Peak learning rate", 1e-3, gt=0)
    weight_decay: float = doc("Weight decay; biases and normalisation weights are left out", 0.0, ge=0)
    momentum: float = doc("SGD only: momentum", 0.0, ge=0, lt=1)
    betas: tuple[float, float] = doc("Adam's kind only: decay rates of the moments", (0.9, 0.999))
    eps: float = doc("Adam's kind only: added to the denominator", 1e-8, gt=0)
    options: dict[str, Any] = doc("Further keyword arguments of the optimizer class", {})

    @property
    def kind(self) -> OptimizerKind:
        """The properties of the optimizer, whatever its settings."""
        return kind_of(self.name)


SCHEDULES = ("constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd", "onecycle")


def _schedule(name: str) -> str:
    """Returns one of SCHEDULES, or an import path. Raises ValueError for a text that is neither."""
    return _known_or_path(name, SCHEDULES, "function")


class Schedule(Frozen):
    name: Annotated[str, AfterValidator(_schedule)] = doc(
        "Shape after the warm-up: constant, linear, cosine, polynomial, inverse_sqrt, wsd (stays at the peak, then "
        "falls) or onecycle; or the import path of a function of (updates, total_updates) (package.module:function)",
        "constant",
    )
    warmup_steps: int = doc("Updates before the peak rate; the first has peak / (warmup_steps + 1)", 0, ge=0)
    warmup_ratio: float = doc("The same as a share of the run's steps; give one of the two", 0.0, ge=0, lt=1)
    final_lr_ratio: float = doc("Where the rate ends, as a share of the peak", 0.0, ge=0, le=1)
    power: float = doc("polynomial only: the exponent of the share that is left; 1 is linear", 1.0, gt=0)
    decay_ratio: float = doc("wsd only: the share of the run's steps in which the rate falls", 0.1, gt=0, le=1)
    decay_steps: int = doc("wsd only: the same in steps; 0 takes decay_ratio", 0, ge=0)
    decay_shape: Literal["linear", "cosine", "sqrt"] = doc("wsd only: how it falls; sqrt is 1 - sqrt(share)", "linear")
    options: dict[str, Any] = doc("Further keyword arguments of a function of your own", {})

    @property
    def own(self) -> bool:
        """Whether the name is the import path of a function."""
        return self.name not in SCHEDULES


class Scaler(Frozen):
    """GradScaler's settings; read by fp16-mixed only."""

    init_scale: float = doc("Loss scale at the start", 65536.0, gt=0)
    growth_factor: float = doc("The scale is multiplied by this after growth_interval good steps", 2.0, gt=1)
    backoff_factor: float = doc("The scale is multiplied by this when a step overflows", 0.5, gt=0, lt=1)
    growth_interval: int = doc("Good steps in a row before the scale grows", 2000, gt=0)


class EarlyStopping(Frozen):
    patience: int = doc("Evaluations without improvement after which the run ends", gt=0)
    min_delta: float = doc("Smallest change that counts as an improvement", 0.0, ge=0)


class Evaluation(Frozen):
    every_steps: int | None = doc("Evaluate every so many steps; left out, by epochs", None, gt=0)
    every_epochs: int = doc("Evaluate every so many epochs", 1, gt=0)
    batch_size: int | None = doc(
        "Samples a process evaluates at once; left out, as in training, at most 128", None, gt=0
    )
    by_set: bool = doc("Mixtures: evaluate each data set separately too, in a second pass", True)
    generation: list[str] = doc(
        "Metrics of the answers to workload.generate's prompts: exact_match, token_f1, bleu, chrf, rouge, or functions "
        "of (answers, references) by import path (package.module:function)",
        [],
    )
    metric: str | None = doc("Metric that decides the best checkpoint; left out, the workload's first", None)
    early_stopping: EarlyStopping | None = doc("End the run when the metric stops improving", None)


class Checkpoints(Frozen):
    every_steps: int | None = doc("Save every so many steps; left out, at each evaluation and at the end", None, gt=0)
    keep_last: int = doc("Newest checkpoints kept", 2, gt=0)
    keep_best: int = doc("Best checkpoints kept besides", 1, ge=0)
    asynchronous: bool = doc("Copy the state to CPU memory and write it while training goes on", False)


class Tracking(Frozen):
    log_every: int = doc("Steps between two points of the curve on screen and in files", 10, gt=0)
    trackers: list[str] = doc(
        "progress, jsonl, tensorboard, wandb, mlflow, trackio, swanlab, prometheus, opentelemetry, or import paths "
        "(package.module:Class); jsonl is always on",
        ["progress"],
    )


class Loader(Frozen):
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = doc(
        "Processes that load and augment ahead of the model; auto: a core of the rank each but one, and at least "
        "two, where a sample takes a millisecond or more, else none",
        "auto",
    )
    prefetch: int = doc("Micro-batches each worker keeps ready", 4, gt=0)


class Loop(Frozen):
    epochs: int | None = doc("Passes over the training data; give epochs or steps", None, gt=0)
    steps: int | None = doc(
        "Steps, each of one global batch and one update, skipped ones included; give epochs or steps", None, gt=0
    )
    collect_every: Annotated[int, Field(ge=0)] | Literal["auto"] = doc(
        "Steps between full collections of Python's garbage; 0: whenever Python starts one; auto: 50 where several "
        "ranks would wait for one another's, else 0",
        "auto",
    )
    max_grad_norm: float | None = doc("Clip the global gradient norm to this", None, gt=0)
