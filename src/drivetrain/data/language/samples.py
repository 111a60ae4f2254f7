"""Samples of a language model: token ids, and which of them are targets."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

Sample = tuple[np.ndarray, np.ndarray]  # ids: (T,) int32; whether each is a target: (T,) bool


class Tokenised(Protocol):
    def __len__(self) -> int: ...
    def load(self, index: int, epoch: int) -> Sample: ...
    def name(self, index: int) -> str: ...


class TextWindows:
    """Windows of one text of N tokens: `length` inputs and the token after each. The last one may be shorter.

    Each epoch they begin elsewhere (the first one at 0), going round: every token but one is a target once an epoch.
    """

    def __init__(self, ids: np.ndarray, length: int, name: str, seed: int = 0) -> None:
        self._ids, self._length, self._name, self._seed = ids, length, name, seed

    def __len__(self) -> int:
        return -(-max(0, len(self._ids) - 1) // self._length)

    def load(self, index: int, epoch: int) -> Sample:
        start = index * self._length
        size = min(self._length, len(self._ids) - 1 - start) + 1
        shift = int(np.random.default_rng([self._seed, epoch]).integers(self._length)) if epoch else 0
        ids = np.asarray(np.take(self._ids, range(start + shift, start + shift + size), mode="wrap"))
        return ids, np.ones(len(ids), dtype=bool)

    def name(self, index: int) -> str:
        return f"{self._name} from token {index * self._length}"


@dataclass(frozen=True)
class TokenSamples:
    """N samples. ids: (total,) int32; targets: (total,) bool; starts, lengths: (N,) int64, the range of each sample's
    tokens. The arrays may be mapped from disk."""

    ids: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int, epoch: int) -> Sample:
        del epoch  # nothing here is random
        part = slice(self.starts[index], self.starts[index] + self.lengths[index])
        return np.array(self.ids[part]), np.array(self.targets[part])  # no views of read-only files

    def name(self, index: int) -> str:
        return self.names[index]


class JoinedSamples:
    """The samples of several data sets, one set after the other."""

    def __init__(self, parts: Sequence[Tokenised], drawn: str = "each sample once an epoch") -> None:
        """drawn: a description of how an order takes samples of the parts."""
        self.parts, self.drawn = parts, drawn
        self.starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def load(self, index: int, epoch: int) -> Sample:
        part, place = self._at(index)
        return part.load(place, epoch)

    @property
    def names(self) -> Sequence[str]:
        return [part.name(index) for part in self.parts for index in range(len(part))]

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self.parts]

    def _at(self, index: int) -> tuple[Tokenised, int]:
        number = bisect.bisect_right(self.starts, index) - 1
        return self.parts[number], index - self.starts[number]
