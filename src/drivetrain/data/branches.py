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

import numpy as np

Sample = tuple[np.ndarray, np.ndarray]  # ids: (T,) int32; whether each is a target: (T,) bool


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


def _before_targets(trained: np.ndarray) -> int:
    first = int(np.argmax(trained)) if trained.any() else len(trained) - 1
    return max(first - 1, 0)
