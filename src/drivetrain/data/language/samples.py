"""Samples of a language model: token ids, and which of them are targets."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

Sample = tuple[np.ndarray, np.ndarray]  # ids: (T,) int32; whether each is a target: (T,) bool


class Tokenised(Protocol):
    def __len__(self) -> int: ...
    def load(self, index: int, epoch: int) -> Any: ...
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


class Pair(NamedTuple):
    """A sample of two: with the chosen answer, and with the rejected one. margin: by how much it is better."""

    chosen: Sample
    rejected: Sample
    margin: float = 0.0

    @property
    def sides(self) -> tuple[Sample, Sample]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class PairSamples:
    """N pairs. chosen, rejected: N samples each; margins: (N,)."""

    chosen: TokenSamples
    rejected: TokenSamples
    margins: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def load(self, index: int, epoch: int) -> Pair:
        return Pair(self.chosen.load(index, epoch), self.rejected.load(index, epoch), float(self.margins[index]))

    def name(self, index: int) -> str:
        return self.chosen.name(index)


class Labelled(NamedTuple):
    """A sample with a label. mismatched: the same prompt with another sample's answer."""

    own: Sample
    mismatched: Sample
    desirable: bool


@dataclass(frozen=True)
class LabelledSamples:
    """N samples with a label each. prompts: (N,), how many of a sample's first tokens are its prompt; partners: (N,),
    the sample whose answer it is mismatched with; length: the most tokens of a mismatched one."""

    own: TokenSamples
    desirable: np.ndarray
    prompts: np.ndarray
    partners: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.own)

    def load(self, index: int, epoch: int) -> Labelled:
        own, other = self.own.load(index, epoch), self.own.load(int(self.partners[index]), epoch)
        begins, ends = (int(self.prompts[each]) for each in (index, self.partners[index]))
        kept = min(begins, max(self.length - len(other[0]) + ends, self.length // 2))  # as pairs are cut
        parts = ((one[begins - kept : begins], two[ends:]) for one, two in zip(own, other, strict=True))
        ids, targets = (np.concatenate(each)[: self.length] for each in parts)
        return Labelled(own, (ids, targets), bool(self.desirable[index]))

    def name(self, index: int) -> str:
        return self.own.name(index)


class PromptSample(NamedTuple):
    """A prompt to answer. ids: (T,) int32; reference: the reply in the data."""

    ids: np.ndarray
    reference: str


@dataclass(frozen=True)
class PromptSamples:
    """N prompts. prompts: N samples without targets; references: the reply of each."""

    prompts: TokenSamples
    references: Sequence[str]

    def __len__(self) -> int:
        return len(self.prompts)

    def load(self, index: int, epoch: int) -> PromptSample:
        return PromptSample(self.prompts.load(index, epoch)[0], self.references[index])

    def name(self, index: int) -> str:
        return self.prompts.name(index)


class JoinedSamples:
    """The samples of several data sets, one set after the other."""

    def __init__(self, parts: Sequence[Tokenised], drawn: str = "each sample once an epoch") -> None:
        """drawn: a description of how an order takes samples of the parts."""
        self.parts, self.drawn = parts, drawn
        self.starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def load(self, index: int, epoch: int) -> Any:
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
