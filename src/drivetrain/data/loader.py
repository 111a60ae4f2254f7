"""Samples on their way to the model: whole accumulation windows for training, plain batches for evaluation."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain.config.training import Loader
from drivetrain.data.order import GlobalOrder, micro_batches, rank_share

Collate = Callable[[Sequence[Any]], dict[str, Tensor]]


class Loadable(Protocol):
    def __len__(self) -> int: ...
    def load(self, index: int, epoch: int) -> Any: ...


@dataclass(frozen=True)
class Window:
    """One step's data on this rank."""

    step: int  # from 0
    epoch: int
    indices: np.ndarray  # of the whole global batch
    micro_batches: list[dict[str, Tensor]]


def training_windows(
    samples: Loadable,
    collate: Collate,
    order: GlobalOrder,
    steps: range,
    micro_batch_size: int,
    loader: Loader,
    data_rank: int = 0,
    data_world: int = 1,
    pin_memory: bool = False,
) -> Iterator[Window]:
    """The windows of the given steps, loaded ahead by `loader.workers` processes.

    One iterator serves the whole run: epochs do not restart the workers, and a resumed run starts at its step.
    """

    def keys() -> Iterator[list[tuple[int, int]]]:
        for step in steps:
            epoch, indices = order.batch(step)
            for piece in micro_batches(rank_share(indices, data_rank, data_world), micro_batch_size):
                yield [(epoch, int(index)) for index in piece]

    batches = iter(_data_loader(samples, collate, keys(), loader, pin_memory))
    reader = order.copy()  # with prefetching workers the keys run ahead, into the next epoch
    for step in steps:
        epoch, indices = reader.batch(step)
        pieces = math.ceil(len(rank_share(indices, data_rank, data_world)) / micro_batch_size)
        yield Window(step, epoch, indices, [next(batches) for _ in range(pieces)])


def evaluation_batches(
    samples: Loadable, collate: Collate, batch_size: int, loader: Loader, pin_memory: bool = False
) -> Iterable[dict[str, Tensor]]:
    """All samples once, in order; the last batch may be smaller."""
    keys = ([(0, i) for i in range(s, min(s + batch_size, len(samples)))] for s in range(0, len(samples), batch_size))
    return _data_loader(samples, collate, keys, loader, pin_memory)


class _Keyed(Dataset[Any]):
    def __init__(self, samples: Loadable) -> None:
        self._samples = samples

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        return self._samples.load(index, epoch)


def _data_loader(
    samples: Loadable, collate: Collate, keys: Iterable[list[tuple[int, int]]], loader: Loader, pin_memory: bool
) -> DataLoader[Any]:
    return DataLoader(
        _Keyed(samples),
        batch_sampler=keys,
        collate_fn=collate,
        num_workers=loader.workers,
        prefetch_factor=loader.prefetch if loader.workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_the_run,
        # DataLoader draws a seed when it starts; from a generator of its own, or dropout would depend on it
        generator=torch.Generator().manual_seed(0),
    )


def _leave_signals_to_the_run(_: int) -> None:
    """Ctrl-C reaches the whole process group; the run saves and ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
