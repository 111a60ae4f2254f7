"""Metrics of a user's file: objects of torchmetrics' kind, and plain functions over all outputs and targets.

A function is called once an evaluation, with the outputs and targets of all samples of all ranks, so that its result
does not depend on how batches were cut, as a mean of the batches' values would. All outputs are kept in CPU memory for
that, and a warning says so once they take much of it. A function that decides which checkpoint is best states which
direction is better: `my_metric.higher_is_better = True`.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.errors import Problem, UserError, problem
from drivetrain.workloads.metrics import Metric

LOG = logging.getLogger(__name__)
FIELD = "workload.path"
MUCH = 256 << 20  # bytes of outputs and targets on one rank
FIX = (
    "give functions of (output, target) that give one number, or objects with update, compute, reset and to, as "
    "torchmetrics has them"
)


class OfAllSamples:
    """A function of (outputs (N, ...), targets (N, ...)) over all samples, as a metric."""

    def __init__(self, name: str, function: Callable[[Tensor, Tensor], Any]) -> None:
        self._name, self._function = name, function
        self.higher_is_better: bool | None = getattr(function, "higher_is_better", None)
        self.process_group: Any = None
        self.distributed_available_fn: Callable[[], bool] = dist.is_initialized
        self.reset()

    def reset(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._bytes = 0

    def to(self, device: torch.device) -> OfAllSamples:
        del device  # what is kept waits in CPU memory
        return self

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        pair = (predictions.detach().cpu(), targets.detach().cpu())
        self._kept.append(pair)
        before, self._bytes = self._bytes, self._bytes + sum(part.nbytes for part in pair)
        if before < MUCH <= self._bytes:
            why = "is a function of all samples' outputs, which are kept until the end of the evaluation"
            cure = "an object with update and compute keeps none"
            LOG.warning("the metric %r %s: %d MB so far; %s", self._name, why, self._bytes >> 20, cure)

    def compute(self) -> float:
        """Returns the value. Raises UserError if the function fails or returns no number."""
        kept = self._kept
        if self.distributed_available_fn():
            parts: list[Any] = [None] * dist.get_world_size(self.process_group)
            dist.all_gather_object(parts, kept, group=self.process_group)
            # batches were dealt in turns: the samples' own order again
            kept = [pair for turn in itertools.zip_longest(*parts) for pair in turn if pair is not None]
        outputs, targets = (self._joined([pair[side] for pair in kept]) for side in (0, 1))
        return self._number(self._called(outputs, targets))

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Joins the parts. Raises UserError if they differ in more than their first dimension."""
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1:
            one, other = (tuple(shape) for shape in list(shapes)[:2])
            why = f"the metric {self._name!r} would join batches whose samples have shapes {one} and {other}"
            raise problem(FIELD, why, "pad in collate to one length, or give an object with update and compute")
        return torch.cat(parts)

    def try_out(self, output: Tensor, target: Tensor) -> None:
        """Raises UserError if the function cannot be called with outputs and targets, or returns no number.

        Few samples may lack what it needs (both classes, some variance), so a ValueError or a division by zero is no
        failure here.
        """
        try:
            value = self._called(output, target)
        except UserError as error:
            if isinstance(error.__cause__, ValueError | ZeroDivisionError):
                return
            raise
        self._number(value)

    def _called(self, output: Tensor, target: Tensor) -> Any:
        try:
            return self._function(output, target)
        except Exception as error:
            shapes = f"of outputs {tuple(output.shape)} and targets {tuple(target.shape)}"
            why = f"the metric {self._name!r} failed {shapes}: {type(error).__name__}: {error}"
            fix = "correct it; it is called with the outputs and targets of all samples"
            raise problem(FIELD, why, fix) from error

    def _number(self, value: Any) -> float:
        """Returns a number. Raises UserError for any other value."""
        one = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, SupportsFloat)
        if not one:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            fix = "let it give one number"
            raise problem(FIELD, f"the metric {self._name!r} gives {shown}, not one number", fix)
        return float(value)


def metrics_of(given: Any) -> dict[str, Metric]:
    """Returns the metrics that a file's `metrics` stands for: a mapping by name, one function, or a function that makes
    a mapping. Raises UserError with every entry that is no metric."""
    if isinstance(given, list | tuple):
        raise problem(FIELD, "metrics is a list, in which they have no names", 'give a dict, {"recall": recall}')
    if not isinstance(given, Mapping):
        given = {getattr(given, "__name__", "metric"): given} if is_function(given) else given()
    if not isinstance(given, Mapping):
        raise problem(FIELD, f"metrics gives a {type(given).__name__}", f"give a dict of them by name; {FIX}")
    problems = [
        Problem(FIELD, f"metrics[{name!r}] {_why_none(each)}", FIX)
        for name, each in given.items()
        if not (_is_metric(each) or is_function(each))
    ]
    if problems:
        raise UserError(problems)
    return {str(name): OfAllSamples(str(name), each) if is_function(each) else each for name, each in given.items()}


def is_function(given: Any) -> bool:
    """Returns whether it can be called with an output and a target, and is no metric's class or object."""
    if inspect.isclass(given) or _is_metric(given) or not callable(given):
        return False
    try:
        inspect.signature(given).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a built-in that has no signature
        return True
    return True


def _why_none(given: Any) -> str:
    """Returns why the object is no metric."""
    if inspect.isclass(given):
        return f"is a class, no metric: write {given.__name__}()"
    if callable(given):
        return f"cannot be called with an output and a target: it takes {inspect.signature(given)}"
    return f"is of type {type(given).__name__}, no metric"


def _is_metric(given: Any) -> bool:
    return not inspect.isclass(given) and all(hasattr(given, name) for name in ("update", "compute", "reset", "to"))
