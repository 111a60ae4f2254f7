"""Computes what samples carry of a model as it starts: once, kept in files that later runs and resumes read.

Numbers are written as they come, by one rank of each machine, into a file that all its ranks map in the end: none of
them holds more than the batches under way.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from drivetrain.data.cache_entries import keep_below_bound
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.passes import Passes
from drivetrain.models.digest import digest
from drivetrain.runtime.atomic_file import in_use, remove_abandoned, replacing
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.loss_contract import LossContext, Precomputed

AT_ONCE = 64  # batches that are made together
PREFIX = "reference-"  # of the names of files


def precompute(
    workload: Workload, engine: Engine, ranks: Communicator, batch_size: int, precision: str, training: bool
) -> None:
    """Computes on all ranks together, by the engine that holds the model as it starts. Numbers that every rank finds in
    its folder are read instead.

    batch_size: samples that run forward at once. precision: by its name, which decides the rounding.
    """
    for each in workload.precomputed(training):
        key = next(known for known in ranks.all_gather(each.key) if known is not None)
        file = each.folder / f"{PREFIX}{digest([key, precision])}.npy"
        shape = len(each.samples), each.width
        kept = None
        if not all(ranks.all_gather(_read(file, shape) is not None)):
            with _kept(file, shape, ranks) as kept:
                _compute(each, kept, workload, engine, ranks, batch_size)
        found = _read(file, shape)
        if not all(ranks.all_gather(found is not None)):  # a disk refused, and the first rank holds them
            held = kept if found is None else found
            sent: np.ndarray = ranks.on_first(lambda held=held: np.array(held))  # type: ignore[misc]
            found = sent if found is None else found
        assert found is not None
        each.take(found)


def precompute_beside(
    workload: Workload,
    build: Callable[[Workload], Engine],
    ranks: Communicator,
    batch_size: int,
    precision: str,
    training: bool,
) -> None:
    """Computes what samples carry of another model than the one that is trained, before that one is built. The other
    model is let go of afterwards.

    build: returns the engine of a workload that is only evaluated.
    """
    other = workload.computed_beside
    if other is None:
        return
    engine = build(other)
    precompute(other, engine, ranks, batch_size, precision, training)
    engine.close()
    del engine, other
    gc.collect()  # a wrapped model is a cycle: its memory must be free before the next one is built


def _compute(
    each: Precomputed,
    kept: np.ndarray | None,
    workload: Workload,
    engine: Engine,
    ranks: Communicator,
    batch_size: int,
) -> None:
    """Fills `kept`, (N, width) fp32, on the ranks that have it. Each rank runs a part of the samples."""

    def work(model: nn.Module, batch: Batch, context: LossContext) -> Sequence[Tensor]:
        del context
        return [*each.work(model, batch).float().cpu()]

    passes = Passes(engine, workload, ranks, batch_size)
    rows, workload.rows = workload.rows, None  # packed rows are as long as their samples
    count = len(each.samples)
    try:
        step = AT_ONCE * batch_size * engine.data_world
        for start in range(0, count, step):
            numbers = range(start, min(start + step, count))
            mine = [*numbers[engine.data_rank :: engine.data_world]]
            found = passes.each([each.samples.load(number, 0) for number in mine], work)
            for places, results in passes.of_data_ranks((mine, [row.tolist() for row in found])):
                if kept is not None:
                    kept[places] = np.asarray(results, dtype=np.float32).reshape(-1, each.width)
    finally:
        workload.rows = rows


def _read(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Returns the array, mapped from the file; None where it is missing or damaged."""
    try:
        found: np.ndarray = np.load(file, mmap_mode="r")
    except (OSError, ValueError):
        return None
    return found if found.shape == shape and found.dtype == np.float32 and bool(np.isfinite(found).all()) else None


@contextmanager
def _kept(file: Path, shape: tuple[int, int], ranks: Communicator) -> Iterator[np.ndarray | None]:
    """Yields, on the first rank of each machine, an array to fill, which is the file at the end; None on the others.
    After an error nothing is left of it.

    A disk that refuses is no loss: the array is in memory then, and the numbers are made again next time.
    """
    if ranks.all_gather(socket.gethostname()).index(socket.gethostname()) != ranks.rank:
        yield None
        return
    with ExitStack() as opened:
        values = _mapped(file, shape, opened)
        yield np.empty(shape, dtype=np.float32) if values is None else values
        with suppress(OSError):
            opened.close()
            keep_below_bound(file.parent)


def _mapped(file: Path, shape: tuple[int, int], opened: ExitStack) -> np.ndarray | None:
    """Returns an array that is written to a file beside `file`, which takes its place when `opened` is left; None if
    the disk has no room for it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(file.parent, f"{PREFIX}*.npy")
        with ExitStack() as trying:
            aside = trying.enter_context(replacing(file))
            values: np.ndarray = np.lib.format.open_memmap(aside, mode="w+", dtype=np.float32, shape=shape)
            _reserve(aside)
            trying.enter_context(in_use(aside))  # last: closing the file anywhere in this process ends the lock
            opened.push(trying.pop_all())
            return values
    except OSError:
        return None


def _reserve(file: Path) -> None:
    """Takes the whole file's room on the disk now: writing to a mapped file that finds none would end the process."""
    if hasattr(os, "posix_fallocate"):
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
