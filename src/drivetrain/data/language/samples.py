"""Samples of a language model: token ids, and which of them are targets."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

Sample = tuple[np.ndarray, np.ndarray]  # ids: (T,) int32; whether each is a target: (T,) bool
BLOCK = 256  # rows of a stream read and tokenised together
BLOCKS_KEPT = 64


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
        ids = np.take(self._ids, range(start + shift, start + shift + size), mode="wrap")
        return ids, np.ones(len(ids), dtype=bool)

    def name(self, index: int) -> str:
        return f"{self._name} from token {index * self._length}"


@dataclass(frozen=True)
class TokenSamples:
    """N samples, end to end. ids: (total,) int32; targets: (total,) bool; offsets: (N + 1,) int64."""

    ids: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int, epoch: int) -> Sample:
        del epoch  # nothing here is random
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[part], self.targets[part]

    def name(self, index: int) -> str:
        return self.names[index]

    def take(self, indices: np.ndarray) -> TokenSamples:
        parts = [slice(self.offsets[i], self.offsets[i + 1]) for i in indices]
        return TokenSamples(
            np.concatenate([self.ids[:0], *(self.ids[part] for part in parts)]),
            np.concatenate([self.targets[:0], *(self.targets[part] for part in parts)]),
            np.cumsum([0, *(part.stop - part.start for part in parts)], dtype=np.int64),
            [self.names[i] for i in indices],
        )

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


class StreamedSamples:
    """Rows tokenised when they are asked for, some blocks kept: whoever asks goes through them nearly in order."""

    def __init__(self, count: int, read: Callable[[int, int], list[Sample]], name: Callable[[int], str]) -> None:
        """read: start and stop → the samples of these rows."""
        self._count, self._read, self.name = count, read, name
        self._blocks: OrderedDict[int, list[Sample]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def load(self, index: int, epoch: int) -> Sample:
        del epoch
        block, place = divmod(index, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._read(block * BLOCK, min(self._count, (block + 1) * BLOCK))
            if len(self._blocks) > BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block)
        return self._blocks[block][place]


class JoinedSamples:
    """The samples of several data sets, one set after the other."""

    def __init__(self, parts: Sequence[Tokenised]) -> None:
        self.parts = parts
        self.starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def load(self, index: int, epoch: int) -> Sample:
        part, place = self._at(index)
        return part.load(place, epoch)

    @property
    def names(self) -> Sequence[str]:
        return [part.name(index) for part in self.parts for index in range(len(part))]

    def _at(self, index: int) -> tuple[Tokenised, int]:
        number = bisect.bisect_right(self.starts, index) - 1
        return self.parts[number], index - self.starts[number]
