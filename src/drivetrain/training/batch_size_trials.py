"""The sizes that `micro_batch_size: auto` may try, and the results so far.

Separate from batch_size_finder.py, which tries them: the launcher reads the next one, and starts without models or
engines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drivetrain.config.run import RunConfig
from drivetrain.runtime.atomic_file import write_whole

_FILE = "sizes.json"


@dataclass
class Tried:
    """Sizes that fit, the smallest that does not, and the one under way, which outlives the processes that try it."""

    fit: list[int] = field(default_factory=list)
    fails: int | None = None
    trying: int | None = None
    least: int = 1  # fewer are too few for the model
    planned: int | None = None  # the size that a plan expects to fit, which is tried first

    @classmethod
    def read(cls, folder: Path) -> Tried:
        path = folder / _FILE
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()

    def write(self, folder: Path) -> None:
        write_whole(folder / _FILE, json.dumps(asdict(self)))

    @property
    def largest(self) -> int:
        return max(self.fit, default=0)

    def next(self, sizes: Sequence[int]) -> int | None:
        """Returns the next of the ascending sizes: the planned one, then twice the largest so far until one fails, then
        the middle of the rest."""
        open_ = [size for size in self.possible(sizes) if self.largest < size < (self.fails or math.inf)]
        if not open_:
            return None
        if self.planned is not None and not self.fit and self.fails is None:
            return max((size for size in open_ if size <= self.planned), default=open_[0])
        if self.fails is not None:
            return open_[len(open_) // 2]
        return max((size for size in open_ if size <= 2 * self.largest), default=open_[0])

    def possible(self, sizes: Sequence[int]) -> list[int]:
        return [size for size in sizes if size >= self.least]


def sizes(config: RunConfig) -> list[int]:
    """Returns the numbers of samples that cut a device's share of a step into pieces of near-equal size,
    ascending.

    A pipeline's stages need a piece each.
    """
    pieces = config.engine.stages
    share = math.ceil(config.step_samples / config.data_parallel_size)
    return sorted({math.ceil(share / count) for count in range(min(pieces, share), share + 1)})
