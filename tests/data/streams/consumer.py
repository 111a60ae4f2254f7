"""One rank that goes through a stream as a training does, and writes down what it takes: run and killed by a test.

python consumer.py FOLDER CACHE BUFFER BATCH FIRST LAST RANK WORLD WORKERS OUTPUT
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from drivetrain.config.training import Loader
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.streams.mixture import Mix, StreamedMixture
from tests.data.streams.shard_files import numbers_of, opened


def collated(samples: Sequence[int]) -> dict[str, torch.Tensor]:
    return {"number": torch.tensor(samples)}


def taken(
    folder: Path, cache: Path, buffer: int, batch: int, steps: range, rank: int, world: int, workers: int
) -> Iterator[list[int]]:
    """The numbers that a rank takes, step by step, in a process that knows nothing of what came before."""
    mixture = StreamedMixture([numbers_of(opened(folder, cache), buffer)], Mix())
    order, mine = mixture.order(batch, 0, by_epochs=False), Slice(rank, world, 3)
    for window in training_windows(mixture, collated, order, steps, mine, Loader(workers=workers)):
        yield [int(number) for each in window.micro_batches if each.counts for number in each.tensors["number"]]


if __name__ == "__main__":
    folder, cache, buffer, batch, first, last, rank, world, workers, output = sys.argv[1:]
    with open(output, "a", encoding="utf-8", buffering=1) as written:
        steps = range(int(first), int(last))
        numbers = taken(Path(folder), Path(cache), int(buffer), int(batch), steps, int(rank), int(world), int(workers))
        for step, own in zip(steps, numbers, strict=True):
            written.write(f"{step} {' '.join(map(str, own))}\n")
            time.sleep(0.001)  # a step, so that a kill finds it on its way
