"""The data of planned runs, read once for all that have the same."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from drivetrain.config.run import RunConfig
from drivetrain.training.assemble import read_workload
from drivetrain.workloads.base import Workload

DECIDES = {"workload", "seed", "adapter", "quantised_base", "quantisation_aware"}


_STANDS_FOR: ContextVar[int | None] = ContextVar("stands_for", default=None)  # made samples: how many others


@contextmanager
def standing_for(samples: int | None) -> Iterator[None]:
    """While the block runs, the training data that are read are made ones, and stand for so many samples: they are all
    alike, and to write and tokenise a large number of them would take hours. None: data stand for themselves."""
    token = _STANDS_FOR.set(samples)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


def stands_for() -> int | None:
    """Returns how many samples made ones stand for just now; None: data stand for themselves."""
    return _STANDS_FOR.get()


class Samples:
    """The workload of the latest run, kept for the next one if that has the same."""

    def __init__(self) -> None:
        self._key = ""
        self._workload: Workload | None = None
        self.seconds = 0.0  # that reading the latest workload took

    def hold(self, run: RunConfig, workload: Workload) -> None:
        """Takes a workload that was built for a run already."""
        self._key, self._workload = run.model_dump_json(include=DECIDES), workload

    def of(self, run: RunConfig) -> Workload:
        """Returns the run's workload. Raises UserError where its data or model cannot be read."""
        key = run.model_dump_json(include=DECIDES)
        if self._workload is None or key != self._key:
            start = time.perf_counter()
            self._key, self._workload = key, read_workload(run, training=True, change=_repeat)
            self.seconds = time.perf_counter() - start
        return self._workload


class RepeatedInOrder:
    """Made samples, one after the other and again from the first one, in the order of as many as they stand for."""

    def __init__(self, num_samples: int, batch_size: int, made: int) -> None:
        """num_samples: of an epoch. made: samples that there are."""
        self.num_samples, self.steps_per_epoch = num_samples, math.ceil(num_samples / batch_size)
        self._batch_size, self._made = batch_size, made

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self._batch_size
        indices = range(start, min(start + self._batch_size, self.num_samples))
        return epoch, np.array([index % self._made for index in indices], np.int64)

    def drawn_before(self, step: int) -> list[int]:
        del step  # there is no mixture
        return []


def _repeat(workload: Workload) -> None:
    samples = stands_for()
    if samples is None:
        return
    made = len(workload.train)

    def order(batch_size: int, seed: int, by_epochs: bool) -> RepeatedInOrder:
        del seed, by_epochs
        return RepeatedInOrder(samples, batch_size, made)

    workload.train, workload.order = _counted_as(workload.train, samples), order  # type: ignore[method-assign]


def _counted_as(made: Any, samples: int) -> Any:
    """Returns made samples as ones of the same class of which there are `samples`: a rule that compares a number with
    theirs, as the batch's, has to see that one."""
    kind, few, found = type(made), len(made), copy.copy(made)

    def load(self: Any, index: int, epoch: int) -> Any:
        return kind.load(self, index % few, epoch)

    found.__class__ = type(kind.__name__, (kind,), {"__len__": lambda _: samples, "load": load})
    return found
