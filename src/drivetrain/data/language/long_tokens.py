"""Tokenises texts that are read in pieces, with the same tokens as the whole text.

A tokenizer may look at the text before and after, so a piece is tokenised with some text on both sides of it. Two
consecutive pieces are joined where both have the same tokens for all characters around the place between them: there
each had enough text around it. Where that fails the text is tokenised whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.block_work import block_file, worked_off
from drivetrain.data.flat_encoding import encode
from drivetrain.data.long_text import LongText

AROUND = 1 << 12  # bytes on each side of a piece
COMPARED = 512  # characters on each side of a place between two; they take at most 2,048 bytes


@dataclass(frozen=True)
class PieceWork:
    """Pieces of texts to tokenise. places: for each text its `LongText.places`."""

    tokenizer: Any
    folder: Path
    texts: Sequence[LongText]
    places: Sequence[Sequence[int]]

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """Returns text and piece."""
        return [(text, piece) for text, places in enumerate(self.places) for piece in range(len(places) - 1)]

    def make(self, number: int) -> dict[str, np.ndarray]:
        """Returns ids: (N,), of the piece with the text around it, in as few bytes as they need; left, right: (K, 3)
        int64, for each token of the characters compared at that end its first character, counted from the piece's edge,
        its id and its number.
        """
        text, places = self.texts[self.blocks[number][0]], self.places[self.blocks[number][0]]
        piece = self.blocks[number][1]
        start, stop = places[piece], places[piece + 1]
        first = start if piece == 0 else text.character(max(text.start, start - AROUND))
        last = stop if stop == text.end else text.character(min(text.end, stop + AROUND))
        before, own, after = text.span(first, start), text.span(start, stop), text.span(stop, last)
        encoded = encode(self.tokenizer, [before + own + after], spans=True)
        assert encoded.spans is not None
        starts, edge = encoded.spans[:, 0], len(before)
        left, right = (_around(starts - at, encoded.ids) for at in (edge, edge + len(own)))
        return {"ids": compact(encoded.ids), "left": left, "right": right}


def compact(ids: np.ndarray) -> np.ndarray:
    """Returns the same ids in the smallest type of unsigned numbers that holds them."""
    return ids.astype(np.min_scalar_type(int(ids.max(initial=0))))


def _around(starts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """starts: (N,), each token's first character, counted from the edge."""
    near = np.flatnonzero((starts >= -COMPARED) & (starts < COMPARED))
    return np.stack([starts[near], ids[near], near], axis=1).astype(np.int64)


class NoPlaceError(Exception):
    """Two pieces have different tokens for the same characters."""


def tokens_of(tokenizer: Any, texts: Sequence[LongText], folder: Path) -> Iterator[Iterator[np.ndarray]]:
    """Yields for each text its ids, in parts. folder: where finished pieces are kept for a builder that goes on."""
    if not tokenizer.is_fast:  # it does not say where its tokens stand
        yield from (_whole(tokenizer, text) for text in texts)
        return
    places = [text.places() for text in texts]
    work = PieceWork(tokenizer, folder, texts, places)
    sizes = [end - start for each in places for start, end in pairwise(each)]
    worked_off(work, np.array(sizes, np.int64))
    number = 0
    for text, each in zip(texts, places, strict=True):
        numbers = range(number, number + len(each) - 1)
        number = numbers.stop
        yield _joined(tokenizer, text, folder, numbers)


def _joined(tokenizer: Any, text: LongText, folder: Path, numbers: range) -> Iterator[np.ndarray]:
    try:
        bounds = list(_bounds(folder, numbers))
    except NoPlaceError:
        why = "pieces of it have other tokens than the whole, which is tokenised at once"
        print(f"{text.path}: {why}", file=sys.stderr, flush=True)
        yield from _whole(tokenizer, text)
        return
    for number, (start, stop) in zip(numbers, bounds, strict=True):
        yield _loaded(folder, number)["ids"][start:stop].astype(np.int32)


def _whole(tokenizer: Any, text: LongText) -> Iterator[np.ndarray]:
    encoded = tokenizer([text.span(text.start, text.end)], add_special_tokens=False, verbose=False)
    yield np.array(encoded["input_ids"][0], np.int32)


def _bounds(folder: Path, numbers: range) -> Iterator[tuple[int, int | None]]:
    """Yields for each piece its first token, and the one behind its last. Raises NoPlaceError if two pieces cannot be
    joined."""
    start = 0
    for number in numbers[:-1]:
        stop, following = _place(_loaded(folder, number)["right"], _loaded(folder, number + 1)["left"])
        if stop <= start:
            raise NoPlaceError
        yield start, stop
        start = following
    yield start, None


def _place(right: np.ndarray, left: np.ndarray) -> tuple[int, int]:
    """Returns the numbers of the same token, at which a character begins, in the piece before and in the one behind."""
    same = right.shape == left.shape and bool((right[:, :2] == left[:, :2]).all())
    begins = np.flatnonzero((right[1:, 0] >= 0) & (right[1:, 0] != right[:-1, 0])) + 1
    if not same or not len(begins):
        raise NoPlaceError
    return int(right[begins[0], 2]), int(left[begins[0], 2])


def _loaded(folder: Path, number: int) -> dict[str, np.ndarray]:
    with np.load(block_file(folder, number), allow_pickle=False) as held:
        return dict(held)
