"""The batches of a traced step: real ones, collated as a training does, and their counterparts without numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch, Window, training_windows
from drivetrain.distributed.real_numbers import real_numbers
from drivetrain.engines.base import Engine
from drivetrain.memory.transfers import remember
from drivetrain.training.auto_settings import order_of, rows_of
from drivetrain.training.batching import slice_of, window_slice
from drivetrain.training.windows import stand_in_window, windows_of
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import MakesSamples


def first_window(run: RunConfig, machine: Machine, workload: Workload, engine: Engine) -> Window:
    """Returns the first step's data on the engine's rank."""
    order, mine = order_of(run, workload), window_slice(run, machine, workload, engine)
    if isinstance(workload, MakesSamples):
        return stand_in_window(workload, order, mine)
    return next(windows_of(run, workload, engine, order, range(1), mine, workers=False))


def shapes_of_batches(
    run: RunConfig, machine: Machine, workload: Workload, data_rank: int, data_world: int
) -> list[dict[str, tuple[int, ...]]] | None:
    """Returns the shapes of the first step's batches on a data rank; None where they depend on the model."""
    if isinstance(workload, MakesSamples):
        return None
    workload.rows = rows_of(run, machine, workload, compiles=False)
    mine = slice_of(run, machine, workload, data_rank, data_world)
    loader = run.loader.model_copy(update={"workers": 0})
    windows = training_windows(workload.train, workload.collate, order_of(run, workload), range(1), mine, loader, False)
    return [{name: tuple(t.shape) for name, t in batch.tensors.items()} for batch in next(windows).micro_batches]


def without_numbers(batches: Sequence[MicroBatch], mode: FakeTensorMode) -> list[MicroBatch]:
    """Returns the same batches as tensors of `mode`. Their numbers stay where the host reads them (`on_host`)."""
    return [
        MicroBatch({name: _fake(tensor, mode) for name, tensor in batch.tensors.items()}, batch.counts, batch.positions)
        for batch in batches
    ]


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    with real_numbers():
        remember(fake, tensor.numpy())
    return fake
