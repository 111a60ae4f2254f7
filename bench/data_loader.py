"""The loader beside a plain loop over samples in memory: `python bench/data_loader.py RUN.yaml`.

Both collate batches of samples in a random order; the plain loop indexes a list of samples that were loaded before. In
turns within one process, by processor seconds, so that other work counts little; the median of ratios.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ours import checked

from drivetrain.config.training import Loader
from drivetrain.data.loaded_together import LoadedTogether
from drivetrain.data.loader import evaluation_batches
from drivetrain.workloads.build import build_workload

BATCHES, TURNS, SIZE = 150, 9, 64


class Some(LoadedTogether):
    """The first samples of a data set, in a random order."""

    def __init__(self, samples: Any, count: int) -> None:
        self._samples, self._order = samples, np.random.default_rng(0).permutation(len(samples))[:count]

    def __len__(self) -> int:
        return len(self._order)

    def load(self, index: int, epoch: int) -> Any:
        return self._samples.load(int(self._order[index]), epoch)

    def load_together(self, indices: Sequence[int]) -> Any:
        together = isinstance(self._samples, LoadedTogether)
        return self._samples.load_together(self._order[list(indices)].tolist()) if together else None


def main(run_file: Path) -> None:
    config = checked(run_file)
    workload = build_workload(config.workload, config.seed)
    some = Some(workload.train, BATCHES * SIZE)
    held = [some.load(index, 0) for index in range(len(some))]

    def plain() -> Iterator[Any]:
        for start in range(0, len(held), SIZE):
            yield workload.collate([held[index] for index in range(start, min(start + SIZE, len(held)))])

    def ours() -> Iterator[Any]:
        return (batch.tensors for batch in evaluation_batches(some, workload.collate, SIZE, Loader(workers=0)))

    ratios = []
    for turn in range(TURNS):
        sides = (plain, ours) if turn % 2 else (ours, plain)
        took = {}
        for side in sides:
            start = time.process_time()
            count = sum(1 for _ in side())
            took[side] = (time.process_time() - start) / count
        ratios.append(took[plain] / took[ours])
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"{len(some)} samples: {statistics.median(ratios):.3f} of the plain loop's rate ({spread})")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
