"""Samples of a language model: token ids, and which of them are targets."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from drivetrain.data.branches import Sample, shared_of_all, shared_tokens


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

    @property
    def content(self) -> Sequence[np.ndarray]:
        """The arrays that decide the samples."""
        return self.ids, self.targets, self.starts, self.lengths

    def name(self, index: int) -> str:
        return self.names[index]


class Pair(NamedTuple):
    """A sample of two: with the chosen answer, and with the rejected one. margin: by how much it is better. reference:
    (2,) fp32, their log-probabilities under a reference, where these were computed before."""

    chosen: Sample
    rejected: Sample
    margin: float = 0.0
    reference: np.ndarray | None = None

    @property
    def sides(self) -> tuple[Sample, Sample]:
        return self.chosen, self.rejected

    @property
    def shared(self) -> int:
        """Returns how many first tokens both sides share (`shared_tokens`)."""
        return shared_tokens(self.sides)


@dataclass(frozen=True)
class PairSamples:
    """N pairs. chosen, rejected: N samples each; margins: (N,); reference: (N, 2), as a `Pair` has it."""

    chosen: TokenSamples
    rejected: TokenSamples
    margins: np.ndarray
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    @cached_property
    def shared(self) -> np.ndarray:
        """Returns how many first tokens the sides of each pair share, (N,)."""
        return shared_of_all(self.chosen, self.rejected)

    def load(self, index: int, epoch: int) -> Pair:
        known = None if self.reference is None else np.array(self.reference[index])
        sides = self.chosen.load(index, epoch), self.rejected.load(index, epoch)
        return Pair(*sides, float(self.margins[index]), known)

    @property
    def content(self) -> Sequence[np.ndarray]:
        return [*self.chosen.content, *self.rejected.content]

    def name(self, index: int) -> str:
        return self.chosen.name(index)


class Labelled(NamedTuple):
    """A sample with a label. mismatched: the same prompt with another sample's answer. reference: (2,) fp32, the
    log-probabilities of both under a reference, where these were computed before."""

    own: Sample
    mismatched: Sample
    desirable: bool
    reference: np.ndarray | None = None

    @property
    def sides(self) -> tuple[Sample, Sample]:
        return self.own, self.mismatched

    @property
    def shared(self) -> int:
        """Returns how many first tokens both share (`shared_tokens`): fewer than the prompt has where a long answer of
        another sample cuts its beginning."""
        return shared_tokens(self.sides)


@dataclass(frozen=True)
class LabelledSamples:
    """N samples with a label each. prompts: (N,), how many of a sample's first tokens are its prompt; partners: (N,),
    the sample whose answer it is mismatched with; length: the most tokens of a mismatched one."""

    own: TokenSamples
    desirable: np.ndarray
    prompts: np.ndarray
    partners: np.ndarray
    length: int
    reference: np.ndarray | None = None  # (N, 2)

    def __len__(self) -> int:
        return len(self.own)

    def load(self, index: int, epoch: int) -> Labelled:
        own, other = self.own.load(index, epoch), self.own.load(int(self.partners[index]), epoch)
        begins, ends = (int(self.prompts[each]) for each in (index, self.partners[index]))
        kept = min(begins, max(self.length - len(other[0]) + ends, self.length // 2))  # as pairs are cut
        parts = ((one[begins - kept : begins], two[ends:]) for one, two in zip(own, other, strict=True))
        ids, targets = (np.concatenate(each)[: self.length] for each in parts)
        known = None if self.reference is None else np.array(self.reference[index])
        return Labelled(own, (ids, targets), bool(self.desirable[index]), known)

    @property
    def content(self) -> Sequence[np.ndarray]:
        return [*self.own.content, self.prompts, self.partners, np.array([self.length])]

    def name(self, index: int) -> str:
        return self.own.name(index)


class Steps(NamedTuple):
    """An answer that is marked step by step. own: its tokens, and which of them end a step; labels: (T,) bool, whether
    the step that a token is of is right."""

    own: Sample
    labels: np.ndarray


@dataclass(frozen=True)
class StepSamples:
    """N answers that are marked step by step. labels: (total,) bool, of the tokens of `own`."""

    own: TokenSamples
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.own)

    def load(self, index: int, epoch: int) -> Steps:
        part = slice(self.own.starts[index], self.own.starts[index] + self.own.lengths[index])
        return Steps(self.own.load(index, epoch), np.array(self.labels[part]))

    def name(self, index: int) -> str:
        return self.own.name(index)


class PromptRow(NamedTuple):
    """The row of a prompt, by which answers to it are judged. messages: the prompt's, as a chat template takes them;
    reference: the reply in the data, if any; columns: the row's values by name."""

    messages: Sequence[Mapping[str, Any]]
    reference: str | None
    columns: Mapping[str, Any]


class PromptSample(NamedTuple):
    """A prompt to answer. ids: (T,) int32; row: the row of the data."""

    ids: np.ndarray
    row: PromptRow


@dataclass(frozen=True)
class PromptSamples:
    """N prompts. prompts: N samples without targets; rows: the row of each."""

    prompts: TokenSamples
    rows: Sequence[PromptRow]

    def __len__(self) -> int:
        return len(self.prompts)

    def load(self, index: int, epoch: int) -> PromptSample:
        return PromptSample(self.prompts.load(index, epoch)[0], self.rows[index])

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


def with_reference(samples: Tokenised, reference: np.ndarray) -> Tokenised:
    """Returns pairs or labelled samples that carry log-probabilities under a reference, (N, 2)."""
    assert isinstance(samples, PairSamples | LabelledSamples)
    return replace(samples, reference=reference)


def samples_digest(samples: JoinedSamples) -> str:
    """Returns a digest of the tokens and targets of pairs or labelled samples."""
    found = hashlib.blake2b(digest_size=20)
    for part in samples.parts:
        assert isinstance(part, PairSamples | LabelledSamples)
        for array in part.content:
            found.update(f"{array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
