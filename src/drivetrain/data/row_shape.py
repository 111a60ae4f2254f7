"""The one shape of a training's packed rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rows:
    """tokens: of each row. samples: most in a row. longest: positions of the longest of all samples."""

    tokens: int
    samples: int
    longest: int

    @property
    def sequences(self) -> int:
        """The most sequences in a row, those of padding among them; at least two, so that a row of one is no special
        case."""
        return max(2, self.samples + math.ceil(self.tokens / self.longest))

    def padding(self, total: int) -> np.ndarray:
        """Returns positions of the padding behind `total` tokens up to the row's end: sequences no longer than a
        sample. A sample longer than a row has a row of several times the length, and padding up to its end."""
        return np.arange(-total % self.tokens if total else self.tokens) % self.longest
