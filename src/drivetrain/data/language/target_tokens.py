"""Finds which tokens of samples are targets: those that start within a target's characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from drivetrain.data.flat_encoding import Encoded

NO_TARGET = np.iinfo(np.int32).max


class Span(NamedTuple):
    """Characters that are targets, and the number of their message; -1 if everything is a target."""

    start: int
    end: int
    message: int


@dataclass(frozen=True)
class Rendered:
    """The text of one sample and its targets, in order. unended: the last of them leaves out what ends the reply."""

    text: str
    spans: tuple[Span, ...]
    unended: bool = False


def token_starts(encoded: Encoded, own: slice) -> np.ndarray:
    """Returns the character at which each token of one text starts, (T,) int64. own: which of the tokens are the
    text's."""
    assert encoded.spans is not None
    starts, ends = encoded.spans[own].T
    # without width: a mark that the tokenizer adds, or a space of which RoBERTa's way trims the offsets
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    return np.where(starts == ends, before, starts)


def target_tokens(encoded: Encoded, spans: Sequence[Sequence[Span]]) -> np.ndarray:
    """Returns which tokens are targets, (total,) bool. spans: of each text, in the order of its characters."""
    assert encoded.spans is not None
    starts, ends = encoded.spans[:, 0].copy(), encoded.spans[:, 1]
    behind = np.cumsum(encoded.lengths)
    for text in np.unique(np.searchsorted(behind, np.flatnonzero(starts == ends), side="right")).tolist():
        own = slice(int(behind[text] - encoded.lengths[text]), int(behind[text]))
        starts[own] = token_starts(encoded, own)
    # all texts in one row, each behind the other's characters
    most = max(int(ends.max(initial=0)), max((span.end for each in spans for span in each), default=0)) + 1
    starts += np.repeat(np.arange(len(spans)) * most, encoded.lengths)
    edges = np.array([(n * most + a, n * most + b) for n, each in enumerate(spans) for a, b, _ in each if b > a])
    if not len(edges):
        return np.zeros(len(starts), bool)
    assert (edges[1:, 0] >= edges[:-1, 1]).all()
    within = np.searchsorted(edges[:, 0], starts, side="right") - 1
    return np.asarray((within >= 0) & (starts < edges[within, 1]))


def edges_of_targets(targets: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (N,) int32 each: position in each sample of its first and last target with a token before it; NO_TARGET
    and 0 if there is none. offsets: (N + 1,) int64, where samples begin."""
    counted = targets.copy()
    begins = offsets[:-1][np.diff(offsets) > 0]
    counted[begins] = False  # the first token of a sample has none before it
    places = np.flatnonzero(counted)
    left = np.searchsorted(places, offsets[:-1], side="left")
    right = np.searchsorted(places, offsets[1:], side="left")
    has = right > left
    first = np.full(len(has), NO_TARGET, np.int32)
    last = np.zeros(len(has), np.int32)
    first[has] = places[left[has]] - offsets[:-1][has]
    last[has] = places[right[has] - 1] - offsets[:-1][has]
    return first, last
