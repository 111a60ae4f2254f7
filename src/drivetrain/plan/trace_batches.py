"""The batches of a traced step: real ones, collated as a training does, and their counterparts without numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch, Window, training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import Order
from drivetrain.distributed.real_numbers import real_numbers
from drivetrain.engines.base import Engine
from drivetrain.engines.mesh.context_parallel import part_of
from drivetrain.memory.transfers import remember
from drivetrain.training.auto_settings import order_of, settle_rows, total_steps_of
from drivetrain.training.batching import slice_of, window_slice
from drivetrain.training.windows import stand_in_window, windows_of
from drivetrain.workloads.base import Workload
from drivetrain.workloads.generating import MakesSamples

LOOKED_AT = 32  # steps


def fullest_window(run: RunConfig, machine: Machine, workload: Workload, engine: Engine) -> Window:
    """Returns the data of the fullest step on the engine's rank."""
    order, mine = order_of(run, workload), window_slice(run, machine, workload, engine)
    if isinstance(workload, MakesSamples):
        return stand_in_window(workload, order, mine)
    step = fullest_step(order, mine, total_steps_of(run, order))
    return next(windows_of(run, workload, engine, order, range(step, step + 1), mine, workers=False))


def fullest_step(order: Order, mine: Slice, total: int) -> int:
    """Returns of the first LOOKED_AT steps the one whose largest micro-batch has the most tokens: a device needs memory
    for it, and its time is that of any other step. 0 where all have as many."""
    if mine.lengths is None or mine.lengths.rows is not None:
        return 0
    tokens, packed = mine.lengths.tokens, mine.lengths.packed

    def largest(step: int) -> int:
        pieces = [tokens[piece] for piece in mine.pieces(order.batch(step)[1]) if len(piece)]
        return max((int(each.sum() if packed else len(each) * each.max()) for each in pieces), default=0)

    return max(range(min(total, LOOKED_AT)), key=largest)


def shapes_of_batches(
    run: RunConfig, machine: Machine, workload: Workload, data_rank: int, data_world: int
) -> list[dict[str, tuple[int, ...]]] | None:
    """Returns the shapes of the fullest step's batches on a data rank; None where they depend on the model."""
    if isinstance(workload, MakesSamples):
        return None
    batches = _fullest_batches(run, machine, workload, data_rank, data_world)
    return [{name: tuple(t.shape) for name, t in batch.tensors.items()} for batch in batches]


def fullest_context_rank(run: RunConfig, machine: Machine, workload: Workload) -> int:
    """Returns the context rank whose parts of sequences have the most targets, for which alone logits are made: an
    instruction before its answer has none, and neither has padding."""
    ranks = run.engine.axes.get("cp", 1)
    if ranks == 1 or isinstance(workload, MakesSamples):
        return 0
    batches = _fullest_batches(run, machine, workload, 0, run.data_parallel_size)

    def targets(rank: int) -> int:
        parts = (part_of(batch.tensors, workload.by_position, rank, ranks) for batch in batches)
        return max(map(workload.count, parts))

    return max(range(ranks), key=targets)


def _fullest_batches(
    run: RunConfig, machine: Machine, workload: Workload, data_rank: int, data_world: int
) -> Sequence[MicroBatch]:
    """Returns the batches of the fullest step on a data rank."""
    settle_rows(run, machine, workload, compiles=False)
    mine = slice_of(run, machine, workload, data_rank, data_world)
    loader = run.loader.model_copy(update={"workers": 0})
    order = order_of(run, workload)
    step = fullest_step(order, mine, total_steps_of(run, order))
    windows = training_windows(workload.train, workload.collate, order, range(step, step + 1), mine, loader, False)
    return next(windows).micro_batches


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
