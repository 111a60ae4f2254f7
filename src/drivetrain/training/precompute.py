"""Computes what samples carry of the model as it starts: once, kept in files that later runs and resumes read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from drivetrain.data.cache_entries import keep_below_bound
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.generation.passes import Passes
from drivetrain.models.digest import digest
from drivetrain.runtime.atomic_file import replacing
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.loss_contract import LossContext, Precomputed

AT_ONCE = 64  # batches that are made together


def precompute(
    workload: Workload, engine: Engine, ranks: Communicator, batch_size: int, precision: str, training: bool
) -> None:
    """Computes on all ranks together, by the engine that holds the model as it starts. Numbers that every rank finds in
    its folder are read instead.

    batch_size: samples that run forward at once. precision: by its name, which decides the rounding.
    """
    for each in workload.precomputed(training):
        key = next(known for known in ranks.all_gather(each.key) if known is not None)
        file = each.folder / f"reference-{digest([key, precision])}.npy"
        shape = len(each.samples), each.width
        if not all(ranks.all_gather(_read(file, shape) is not None)):
            values = _computed(each, workload, engine, ranks, batch_size)
            ranks.on_first(lambda file=file, values=values: _write(file, values))  # type: ignore[misc]
            found = _read(file, shape)
            each.take(values if found is None else found)  # a machine that does not see the first one's folder
            continue
        known = _read(file, shape)
        assert known is not None
        each.take(known)


def _computed(
    each: Precomputed, workload: Workload, engine: Engine, ranks: Communicator, batch_size: int
) -> np.ndarray:
    """Returns (N, width) fp32, the same on all ranks, each of which runs a part of the samples."""

    def work(model: nn.Module, batch: Batch, context: LossContext) -> Sequence[Tensor]:
        del context
        return [*each.work(model, batch).float().cpu()]

    passes = Passes(engine, workload, ranks, batch_size)
    values = np.empty((len(each.samples), each.width), dtype=np.float32)
    rows, workload.rows = workload.rows, None  # packed rows are as long as their samples
    try:
        step = AT_ONCE * batch_size * engine.data_world
        for start in range(0, len(values), step):
            numbers = range(start, min(start + step, len(values)))
            mine = [*numbers[engine.data_rank :: engine.data_world]]
            found = passes.each([each.samples.load(number, 0) for number in mine], work)
            for places, results in passes.of_data_ranks((mine, [row.tolist() for row in found])):
                values[places] = np.asarray(results, dtype=np.float32).reshape(-1, each.width)
    finally:
        workload.rows = rows
    return values


def _read(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Returns the array, mapped from the file; None where it is missing or damaged."""
    try:
        found: np.ndarray = np.load(file, mmap_mode="r")
    except (OSError, ValueError):
        return None
    return found if found.shape == shape and found.dtype == np.float32 and bool(np.isfinite(found).all()) else None


def _write(file: Path, values: np.ndarray) -> None:
    """Writes aside, then renames. A disk that refuses is no loss: the numbers are made again next time."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as aside, aside.open("wb") as opened:
            np.save(opened, values)
    keep_below_bound(file.parent)
