"""Evaluates a model, during a training too, and keeps what each sample added to the last evaluation's metrics."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from drivetrain.config.run import RunConfig
from drivetrain.data.fixed_rows import filled_in_order
from drivetrain.data.loader import MicroBatch, evaluation_batches
from drivetrain.data.order import Order
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.runtime.atomic_file import writing
from drivetrain.tracking.events import EvaluationProgress, Event, MixtureEvaluated, Warned
from drivetrain.training.judging import judged, means_of, unrewarded
from drivetrain.training.mixture_report import mixture_report
from drivetrain.training.progress import Progress
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import JudgesAnswers
from drivetrain.workloads.metrics import Accuracy, MeanOfColumn
from drivetrain.workloads.sample_scores import SampleScores, in_order, write_scores

LOG = logging.getLogger(__name__)
EMPTY: Mapping[str, np.ndarray] = MappingProxyType({})


def unseen(done: int) -> None:
    """Shows nothing of how far an evaluation is."""


def evaluate(
    config: RunConfig,
    workload: Workload,
    engine: Engine,
    part: range | None = None,
    scores: SampleScores | None = None,
    shown: Callable[[int], None] = unseen,
) -> dict[str, float]:
    """Returns loss and metrics over the evaluation data, or a part of them, every sample once. scores: takes those of
    the samples that this rank evaluates. shown: called with the number of samples that all ranks have evaluated, after
    each batch."""
    assert workload.evaluation is not None
    if isinstance(workload, JudgesAnswers):
        rows = [*judged(workload, engine, config.evaluation_batch, part).values()]
        if why := unrewarded(rows):
            LOG.warning(why)
        return means_of(rows)
    cuts = evaluation_cuts(workload, config.evaluation_batch, part)
    batches = evaluation_batches(
        workload.evaluation,
        workload.collate,
        config.evaluation_batch,
        config.loader,
        engine.data_rank,
        engine.data_world,
        cuts,
    )
    values = engine.evaluate(_counted(batches, cuts, engine.data_world, shown), workload.metrics(), scores)
    return {**values, **workload.derived(values)}


def _counted(
    batches: Iterator[MicroBatch], cuts: Sequence[range], data_world: int, shown: Callable[[int], None]
) -> Iterator[MicroBatch]:
    ends = np.cumsum([len(cut) for cut in cuts])
    for turn, batch in enumerate(batches, 1):
        yield batch
        shown(int(ends[min(turn * data_world, len(cuts)) - 1]))


class Shown:
    """Sends how far an evaluation is, about once a second."""

    EVERY = 1.0  # seconds

    def __init__(self, send: Callable[[Event], None], step: int, total: int) -> None:
        self._send, self._step, self._total = send, step, total
        self._before = self._done = 0
        self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        """done: samples of this pass."""
        self._done = self._before + done
        if time.monotonic() - self._last >= self.EVERY:
            self._last = time.monotonic()
            self._send(EvaluationProgress(step=self._step, done=self._done, total=self._total))

    def behind(self) -> Shown:
        """Begins another pass, whose samples come behind those evaluated so far."""
        self._before = self._done
        return self


class Evaluations:
    """The evaluations of a run. In a mixture, each data set's part is evaluated once more by itself: the values over
    all stay those of one pass, to the bit. Answers are made and rewarded once: each has metrics of its own."""

    def __init__(
        self,
        config: RunConfig,
        workload: Workload,
        engine: Engine,
        order: Order,
        progress: Progress,
        send: Callable[[Event], None],
    ) -> None:
        self._config, self._workload, self._engine = config, workload, engine
        self._order, self._progress, self._send = order, progress, send
        self._scores = scores_of(workload)
        self._warned: str | None = None

    def __call__(self) -> dict[str, float]:
        """Returns loss and metrics over all evaluation data; sends those of each data set. All ranks take part."""
        if isinstance(self._workload, JudgesAnswers):
            rows = judged(self._workload, self._engine, self._config.evaluation_batch, None)
            values = means_of([*rows.values()])
            self._warn(unrewarded([*rows.values()]))
            by_set = {name: means_of([rows[number] for number in part]) for name, part in self._parts.items()}
        else:
            parts = self._parts
            assert self._workload.evaluation is not None
            shown = Shown(
                self._send, self._progress.step, len(self._workload.evaluation) + sum(map(len, parts.values()))
            )
            of = functools.partial(evaluate, self._config, self._workload, self._engine)
            values = of(scores=self._scores, shown=shown)
            by_set = {name: of(part, shown=shown.behind()) for name, part in parts.items()}
        if not self._workload.data_sets:
            return values
        self._progress.by_set = by_set
        sets = mixture_report(self._workload, self._order, self._progress.step, self._progress.by_set)
        self._send(MixtureEvaluated(step=self._progress.step, sets=sets))
        return values

    def _warn(self, text: str | None) -> None:
        """Sends a warning, unless the evaluation before gave it too."""
        if text is not None and text != self._warned:
            self._send(Warned(message=text))
        self._warned = text

    @property
    def _parts(self) -> Mapping[str, range]:
        """Returns the data sets that are evaluated each by itself, and their samples."""
        wanted = self._workload.data_sets and self._config.evaluation.by_set
        parts = self._workload.evaluation_parts if wanted else {}
        return parts if len(parts) > 1 else {}

    def write_scores(self, ranks: Communicator, path: Path) -> None:
        """Writes the samples' scores at the last evaluation, on the first rank; all ranks take part."""
        write_gathered(self._scores, self._engine.data_rank, ranks, path)


def write_gathered(
    scores: SampleScores, data_rank: int, ranks: Communicator, path: Path, answers: Mapping[str, np.ndarray] = EMPTY
) -> None:
    """Writes the scores of all ranks' samples on the first rank, in the order of the data; all ranks take part.

    answers: scores of answers, the same on all ranks.
    """
    dealt = ranks.gather((data_rank, scores.parts()))
    if dealt is not None:
        with writing(path):
            write_scores({**in_order(dealt), **answers}, path)


def scores_of(workload: Workload) -> SampleScores:
    """Returns what takes the scores of a workload's evaluation samples."""
    metrics = workload.metrics()
    columns = {name: metric for name, metric in metrics.items() if isinstance(metric, MeanOfColumn)}
    means = {name: metric for name, metric in columns.items() if metric.by_sample}
    accuracy = metrics.get("accuracy")
    if not isinstance(accuracy, Accuracy):
        return SampleScores(by_class=False, means=means)
    return SampleScores(by_class=True, ignored=accuracy.ignored, means=means)


def evaluation_cuts(workload: Workload, bound: int, part: range | None = None) -> list[range]:
    """Returns the samples of each of the evaluation's batches, or those of a part of it: `bound` after `bound`, or, if
    packed rows have one length, as many as fill them: one shape for all."""
    assert workload.evaluation is not None
    if part is None:
        part = range(len(workload.evaluation))
    lengths = workload.evaluation_lengths
    if workload.rows is None or lengths is None:
        return [part[start : start + bound] for start in range(0, len(part), bound)]
    cuts = filled_in_order(lengths[part.start : part.stop], workload.rows, bound)
    return [range(part.start + cut.start, part.start + cut.stop) for cut in cuts]
