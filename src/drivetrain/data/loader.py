"""Loads samples for the model: whole accumulation windows for training, plain batches for evaluation."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain.config.training import Loader
from drivetrain.data.loaded_together import LoadedTogether
from drivetrain.data.loading_time import workers_for
from drivetrain.data.mapped import READ_PAGES
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import Order
from drivetrain.data.reviewed import Reviewed
from drivetrain.errors import RunError, UserError

MOST_AHEAD = 2  # micro-batches of each worker, where their number is not the user's
Collate = Callable[[Sequence[Any]], dict[str, Tensor]]


class Loadable(Protocol):
    def __len__(self) -> int: ...
    def load(self, index: int, epoch: int) -> Any: ...


@dataclass(frozen=True)
class MicroBatch:
    """The samples that one rank runs forward at once. counts: False if it only keeps this rank in step with the others:
    if the model's forward and backward communicate, all ranks must run equally many. positions: of its samples in the
    global batch, where it was cut out of one."""

    tensors: dict[str, Tensor]
    counts: bool = True
    positions: np.ndarray | None = None


@dataclass(frozen=True)
class Window:
    """One step's data on this rank. made_at: the step (from 0) that its samples were made at by the model; None: they
    are of the data. Samples are numbered in the data, or among those made at that step."""

    step: int  # from 0
    epoch: int
    indices: np.ndarray  # of the whole global batch
    micro_batches: list[MicroBatch]
    largest: int = 0  # samples of the largest of them
    made_at: int | None = None


def training_windows(
    samples: Loadable,
    collate: Collate,
    order: Order,
    steps: range,
    mine: Slice,
    loader: Loader,
    pin_memory: bool = False,
) -> Iterator[Window]:
    """Yields the windows of these steps, loaded ahead by `loader.workers` processes.

    One iterator serves the whole run: epochs do not restart the workers, and a resumed run starts at its step.
    """

    # epoch, samples, positions of each micro-batch; prefetching workers run some steps ahead
    planned: deque[tuple[int, np.ndarray, list[np.ndarray]]] = deque()

    def keys() -> Iterator[list[tuple[int, int]]]:
        for step in steps:
            epoch, indices = order.batch(step)
            pieces = mine.positions(indices)
            planned.append((epoch, indices, pieces))
            for piece in pieces:
                yield [(epoch, int(index)) for index in (indices[piece] if len(piece) else indices[:1])]

    batches = _batches(samples, collate, keys(), loader, pin_memory)
    for step in steps:
        first = next(batches)  # by now the step is planned
        epoch, indices, pieces = planned.popleft()
        tensors = [first, *(next(batches) for _ in pieces[1:])]
        window = [MicroBatch(batch, len(piece) > 0, piece) for batch, piece in zip(tensors, pieces, strict=True)]
        yield Window(step, epoch, indices, window, max(map(len, pieces)))


def evaluation_batches(
    samples: Loadable,
    collate: Collate,
    batch_size: int,
    loader: Loader,
    data_rank: int = 0,
    data_world: int = 1,
    cuts: Sequence[range] | None = None,
) -> Iterator[MicroBatch]:
    """Yields all samples once over all ranks, in order; the last batch may be smaller.

    Whole batches go to the ranks in turns, so that outputs are the same to the bit on any number of ranks. All ranks
    get equally many: a rank that would get none in the last round gets the last batch again, not to be counted.

    cuts: the samples of each batch; left out, batch_size after batch_size.
    """
    if cuts is None:
        cuts = [range(start, min(start + batch_size, len(samples))) for start in range(0, len(samples), batch_size)]
    rounds = math.ceil(len(cuts) / data_world)
    mine = [turn * data_world + data_rank for turn in range(rounds)]
    keys = ([(0, index) for index in cuts[min(number, len(cuts) - 1)]] for number in mine)
    pins = torch.cuda.is_initialized()  # this process computes on a GPU, which copies pinned memory without waiting
    batches = _batches(samples, collate, keys, loader, pins)
    for number, batch in zip(mine, batches, strict=True):
        yield MicroBatch(batch, counts=number < len(cuts))


class _Keyed(Dataset[Any]):
    def __init__(self, samples: Loadable) -> None:
        self._samples = samples

    def __getitems__(self, keys: list[tuple[int, int]]) -> Sequence[Any]:
        """All samples of a batch, which is how torch asks where it can."""
        READ_PAGES.release()
        samples = self._samples
        found = samples.load_together([index for _, index in keys]) if isinstance(samples, LoadedTogether) else None
        return [self[key] for key in keys] if found is None else found

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Passes a UserError on as an object: torch would rebuild a worker's error from its text alone."""
        epoch, index = key
        try:
            return self._samples.load(index, epoch)
        except UserError as error:
            return error


def _collated(collate: Collate, samples: Sequence[Any]) -> dict[str, Tensor] | UserError:
    listed = samples if isinstance(samples, list) else ()  # none is refused of what was loaded together
    refused = [sample for sample in listed if isinstance(sample, UserError)]
    return UserError([each for error in refused for each in error.problems]) if refused else collate(samples)


def _batches(
    samples: Loadable, collate: Collate, keys: Iterable[list[tuple[int, int]]], loader: Loader, pin_memory: bool
) -> Iterator[dict[str, Tensor]]:
    planned: deque[list[tuple[int, int]]] = deque()  # prefetching workers run some batches ahead

    def noted() -> Iterator[list[tuple[int, int]]]:
        for each in keys:
            planned.append(each)
            yield each

    for batch in _loaded(samples, collate, noted(), loader, pin_memory):
        if isinstance(batch, UserError):
            raise RunError(str(batch))  # of rows that are read while training: work is under way
        READ_PAGES.release()  # of this process too: it reads the texts that predictions show
        indices = [index for _, index in planned.popleft()]
        if isinstance(samples, Reviewed):
            samples.review(indices, batch)
        yield batch


def _loaded(
    samples: Loadable, collate: Collate, keys: Iterable[list[tuple[int, int]]], loader: Loader, pin_memory: bool
) -> Iterable[Any]:
    auto = loader.workers == "auto"
    workers = workers_for(samples) if loader.workers == "auto" else loader.workers
    if not workers and not pin_memory:  # a DataLoader's own work would cost a tenth of a batch of small samples
        keyed = _Keyed(samples)
        return (_collated(collate, keyed.__getitems__(batch)) for batch in keys)
    ahead = min(loader.prefetch, MOST_AHEAD) if auto else loader.prefetch
    # torch says of each loader, twice, that it has more workers than there are cores: a notice says so once a run
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    return DataLoader(
        _Keyed(samples),
        batch_sampler=keys,
        collate_fn=functools.partial(_collated, collate),
        num_workers=workers,
        prefetch_factor=ahead if workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_the_run,
        # DataLoader draws a seed when it starts; from a generator of its own, or dropout would depend on it
        generator=torch.Generator().manual_seed(0),
    )


def _leave_signals_to_the_run(_: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole process group; the run saves and ends its workers itself.

    So a worker obeys the SIGTERM of its parent alone, with which Python ends daemonic children. Only a thread in
    sigwaitinfo learns the sender of a signal; macOS has none, and workers there end at any SIGTERM, as in torch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)  # any other code is reported by torch as a crash of the worker
