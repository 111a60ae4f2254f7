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
    """N samples. ids: (total,) int32; targets: (total,) bool; starts, lengths: (N,) int64, which of the tokens are a
    sample's. The arrays may be mapped from disk."""

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


class StreamedSamples:
    """Rows tokenised when they are asked for, in blocks, of which those among which rows are shuffled are kept."""

    def __init__(
        self,
        count: int,
        read: Callable[[int, int], list[Sample]],
        name: Callable[[int], str],
        buffer: int,
        forward: bool = False,
    ) -> None:
        """read: start and stop → the samples of these rows. buffer: neighbours among which rows are asked for in any
        order (data/order.GlobalOrder). forward: read those in their order, where a step back is dear."""
        self._count, self._read, self.name = count, read, name
        self._buffer, self._forward = buffer, forward
        # twice what a buffer touches, which may begin and end inside of blocks: the block that it shares with the next
        # may have been asked for before all others
        self._most = 2 * (buffer // BLOCK + 2)
        self._blocks: OrderedDict[int, list[Sample]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def load(self, index: int, epoch: int) -> Sample:
        del epoch
        number, place = divmod(index, BLOCK)
        if number not in self._blocks:
            first = index // self._buffer * self._buffer // BLOCK if self._forward else number
            for each in range(first, number + 1):
                if each not in self._blocks:
                    self._blocks[each] = self._read(each * BLOCK, min(self._count, (each + 1) * BLOCK))
                self._blocks.move_to_end(each)
        self._blocks.move_to_end(number)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return self._blocks[number][place]


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
