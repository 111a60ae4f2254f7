"""Cuts a run's data into steps, into the ranks' shares, and those into micro-batches that fit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from drivetrain.config.machine import Machine
from drivetrain.config.micro_batch_backoff import again, reduced, reduction
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch, Window
from drivetrain.data.micro_batches import Lengths, Slice
from drivetrain.data.order import Order
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.errors import OutOfMemory, RunError
from drivetrain.generation.served_answers import ServedAnswers
from drivetrain.runtime.journal import Journal
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.runtime.store_cache import with_addresses
from drivetrain.tracking.events import Event, RolledOut, Warned
from drivetrain.training.auto_settings import micro_batch_tokens, packed_tokens, rows_of
from drivetrain.training.hooks import uncut
from drivetrain.training.progress import Progress
from drivetrain.training.windows import windows_of
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import MakesSamples

AGAIN = "were asked for again after the run was resumed: they may differ from what it would have had without a break"
# of a run: all that decides its weights at each step, and so the samples that it makes
DECIDING_SAMPLES = {"workload", "adapter", "quantised_base", "optimizer", "schedule", "loop", "batch_size", "seed"}
# where answers are drawn, by the same weights
NOT_DECIDING = {"workload": {"reinforcement": {"server"}, "distillation": {"server"}}}


def window_slice(config: RunConfig, machine: Machine, workload: Workload, engine: Engine) -> Slice:
    """Returns how this rank cuts its part out of each global batch."""
    return slice_of(config, machine, workload, engine.data_rank, engine.data_world)


def slice_of(config: RunConfig, machine: Machine, workload: Workload, data_rank: int, data_world: int) -> Slice:
    """Returns how a data rank cuts its part out of each global batch."""
    lengths, most = None, packed_tokens(config, machine, workload.packs) if workload.splits_batches else None
    if workload.lengths is not None and workload.splits_batches:
        lengths = Lengths(
            np.asarray(workload.lengths),
            micro_batch_tokens(config, machine),
            workload.packs,
            most,
            workload.rows if workload.packs else None,
        )
    return Slice(data_rank, data_world, config.micro_batch, lengths, most)


def check_shares(order: Order, mine: Slice, engine: Engine, communicator: Communicator) -> None:
    """Raises RunError unless the ranks' samples of the first step are disjoint and together the global batch."""
    _, indices = order.batch(0)
    own = [int(index) for piece in mine.pieces(indices) for index in piece] if engine.counts_samples else []
    taken = Counter(index for share in communicator.all_gather(own) for index in share)
    wanted = Counter(indices.tolist())
    more, fewer = sorted((taken - wanted).elements()), sorted((wanted - taken).elements())
    if more or fewer:
        raise RunError(
            f"the ranks' samples of the first step are not its global batch of {len(indices)}: taken once too often: "
            f"{_some(more)}; missing: {_some(fewer)}. This is a mistake of drivetrain: please report the run file"
        )


def _some(indices: list[int]) -> str:
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"samples {', '.join(map(str, indices[:8]))}{more}" if indices else "none"


class Batching:
    """The windows of one training, whose micro-batches may become smaller on the way. `slice` is the present cut."""

    def __init__(
        self,
        config: RunConfig,
        machine: Machine,
        workload: Workload,
        engine: Engine,
        order: Order,
        total_steps: int,
        send: Callable[[Event], None],
        given: RunConfig,
        covered: Callable[[], int] = lambda: 0,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """given: the run of the run file; config: with smaller micro-batches, if a start before ran out of memory.
        covered: returns the first step that a resumed run may have to make again. is_stopping: whether a signal asks
        the run to stop, which ends the wait for a server that answers."""
        self._config, self._given, self._machine = config, given, machine
        self._workload, self._engine, self._order, self._total_steps = workload, engine, order, total_steps
        self._send, self._covered = send, covered
        self._server: ServedAnswers | None = None
        if isinstance(workload, MakesSamples) and workload.server is not None:
            self._server = ServedAnswers(workload, engine, workload, Communicator(), config.folder, is_stopping)
        self.slice = window_slice(config, machine, workload, engine)

    def windows(self, progress: Progress) -> Iterator[Window]:
        """Yields the windows of the remaining steps, cut as an earlier part of the run ended up with."""
        before = again(self._given, progress.reduction)
        if before is not self._given and before.micro_batch < self._config.micro_batch:
            self._take(before, progress)
            self._send(Warned(message=f"{self._now}, as this run did before: memory ran out"))
        progress.reduction = reduction(self._given, self._config)
        return self._windows(progress)

    def cut_smaller(self, progress: Progress, samples: int) -> Iterator[Window]:
        """Cuts the next windows in halves, since a micro-batch of so many samples does not fit. Raises OutOfMemory at
        1."""
        smaller = reduced(self._config, samples, self._tokens) if self._workload.splits_batches else None
        if smaller is None:
            return uncut(progress, samples)
        self._take(smaller, progress)
        why = f"step {progress.step + 1}: out of memory with {samples} samples at once"
        reported = f"{why}; it is made again, and the run goes on, with {self._now}"
        if self._engine.statistics:
            reported += ". BatchNorm's statistics are those of a micro-batch: from here on the curve is another"
        self._send(Warned(message=reported))
        return self._windows(progress)

    @contextmanager
    def bounding(self) -> Iterator[None]:
        """Gives an error of memory in the block the bound in tokens that holds: who starts the ranks again halves it,
        and may not know it."""
        try:
            yield
        except OutOfMemory as shortage:
            shortage.tokens = self._tokens
            raise

    @property
    def _tokens(self) -> int | None:
        """The most tokens of a micro-batch, whether the run file bounds them or not."""
        rows = self._workload.rows
        return self.slice.most_made if rows is None else rows.tokens

    def _take(self, config: RunConfig, progress: Progress) -> None:
        self._config = config
        if self._workload.rows is not None:
            self._workload.rows = rows_of(config, self._machine, self._workload, compiles=True)
        self.slice = window_slice(config, self._machine, self._workload, self._engine)
        progress.reduction = reduction(self._given, config)

    @property
    def _now(self) -> str:
        return f"micro-batches of at most {self._config.micro_batch}"

    def _windows(self, progress: Progress) -> Iterator[Window]:
        on_gpu, makes = self._machine.device == "cuda", isinstance(self._workload, MakesSamples)
        steps = range(progress.step, self._total_steps)
        run, workload, engine = self._config, self._workload, self._engine
        windows = windows_of(
            *(run, workload, engine, self._order, steps, self.slice),
            pin_memory=on_gpu,
            journal=self._journal() if makes else None,
            covered=self._covered,
            made=self._report_made,
            server=self._server,
        )
        # samples that the model makes depend on the update before
        return one_ahead(windows, self._engine.expect) if on_gpu and not makes else windows

    def _journal(self) -> Journal:
        """Returns what earlier starts of this run have kept; those of other settings are not found."""
        run = with_addresses(self._given.model_dump(mode="json", include=DECIDING_SAMPLES, exclude=NOT_DECIDING))
        ranks, settings = Communicator(), json.dumps(run, sort_keys=True)
        return Journal(RunFolder(self._given.folder).journal, ranks.rank, settings, ranks.world)

    def _report_made(self, step: int, again: Mapping[str, int]) -> None:
        assert isinstance(self._workload, MakesSamples)
        report = self._workload.rollout()
        if report is not None:
            seconds = {} if self._server is None else self._server.seconds
            self._send(RolledOut(step, {**report.metrics, **seconds}, report.samples))
            for message in report.warnings:
                self._send(Warned(message=f"step {step}: {message}"))
        if again:
            what = " and ".join(f"{number:,} {name}" for name, number in again.items())
            self._send(Warned(message=f"step {step}: {what} {AGAIN}"))


def one_ahead(windows: Iterator[Window], expect: Callable[[Sequence[MicroBatch]], None]) -> Iterator[Window]:
    """Yields the windows; the engine gets each one before the previous one is computed."""
    following = next(windows, None)
    while following is not None:
        now, following = following, next(windows, None)
        if following is not None:
            expect(following.micro_batches)
        yield now
