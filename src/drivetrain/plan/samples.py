"""The data of planned runs, read once for all that have the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from drivetrain.config.run import RunConfig
from drivetrain.data.language.samples import JoinedSamples
from drivetrain.training.assemble import read_workload
from drivetrain.workloads.base import Workload

DECIDES = {"workload", "seed", "adapter", "quantised_base", "quantisation_aware"}


_TIMES: ContextVar[int] = ContextVar("times", default=1)  # that made data stand for their own number


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """While the block runs, the training data of a language model are taken so many times, one after the other: made
    samples are all alike, and to write and tokenise a large number of them would take minutes."""
    token = _TIMES.set(times)
    try:
        yield
    finally:
        _TIMES.reset(token)


def times() -> int:
    """Returns how often data are taken just now."""
    return _TIMES.get()


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


def _repeat(workload: Workload) -> None:
    if times() > 1:
        assert isinstance(workload.train, JoinedSamples), "only a language model's samples are repeated"
        workload.train = JoinedSamples([*workload.train.parts] * times())
