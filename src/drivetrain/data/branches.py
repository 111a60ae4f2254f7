"""Several answers to one prompt in a packed row, where the prompt lies once.

The first answer follows its prompt, and positions run from 0. Each further answer begins at the position at which the
prompt ends, so that positions fall back there, to a number above 0: it is a branch of the sequence that began at 0
last, and sees as many of its first positions as that number says. With the prompt a b c, and answers x y and z:

    tokens     a b c x y z
    positions  0 1 2 3 4 3

The last token of a prompt is not shared: each answer's first token is predicted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

AT_ONCE = 1024  # samples whose tokens are compared together
Sample = tuple[np.ndarray, np.ndarray]  # ids: (T,) int32; whether each is a target: (T,) bool


class Stored(Protocol):
    """N samples, end to end. ids: (total,) int32; targets: (total,) bool; starts, lengths: (N,) int64."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def targets(self) -> np.ndarray: ...
    @property
    def starts(self) -> np.ndarray: ...
    @property
    def lengths(self) -> np.ndarray: ...


def begins_of(positions: np.ndarray) -> np.ndarray:
    """Returns where a sequence or a branch begins in rows of positions: (B, T) → (B, T) bool."""
    begins = np.ones(positions.shape, dtype=bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return begins


def shared_tokens(samples: Sequence[Sample]) -> int:
    """Returns how many first tokens the samples share, up to the last of them without a target behind it; at least one
    token of each is left."""
    (ids, trained), *others = samples
    shared = _before_targets(trained)
    for other, its_targets in others:
        size = min(shared, _before_targets(its_targets))
        differ = np.flatnonzero(ids[:size] != other[:size])
        shared = int(differ[0]) if len(differ) else size
    return shared


def shared_of_all(one: Stored, other: Stored) -> np.ndarray:
    """Returns `shared_tokens` of each sample of one and its like of the other, (N,) int64."""
    count = len(one.lengths)
    found = np.zeros(count, np.int64)
    for start in range(0, count, AT_ONCE):
        some = slice(start, start + AT_ONCE)
        found[some] = _shared(one, other, some)
    return found


def _shared(one: Stored, other: Stored, some: slice) -> np.ndarray:
    sizes = np.minimum(one.lengths[some], other.lengths[some])
    begins = np.cumsum(sizes) - sizes
    inside = np.arange(int(sizes.sum())) - np.repeat(begins, sizes)
    places = [np.repeat(each.starts[some], sizes) + inside for each in (one, other)]

    def first(where: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.minimum.reduceat(np.where(where, inside, len(inside)), begins)
        return np.minimum(found, otherwise)

    differ = first(one.ids[places[0]] != other.ids[places[1]], sizes)
    # a sample without targets is cut before its last token, as if that were one
    ends = [first(each.targets[at], each.lengths[some] - 1) for each, at in zip((one, other), places, strict=True)]
    return np.minimum(differ, np.maximum(np.minimum(*ends) - 1, 0))


def _before_targets(trained: np.ndarray) -> int:
    first = int(np.argmax(trained)) if trained.any() else len(trained) - 1
    return max(first - 1, 0)
