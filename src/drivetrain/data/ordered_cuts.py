"""Cuts samples that stay in their order into micro-batches. Neighbours may have first tokens in common, which a packed
row holds once, so that the order is worth keeping: answers to one prompt share it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class OrderedSizes:
    """The tokens of each of N samples, and how many of them it shares with the sample before it, (N,) each.

    packed: samples are laid end to end; else each is padded to the longest of its micro-batch.
    """

    tokens: np.ndarray
    shared: np.ndarray
    packed: bool

    def loads(self, begin: int) -> Iterator[int]:
        """Yields how many tokens a micro-batch has that begins with this sample, with each further one."""
        total = longest = 0
        for place in range(begin, len(self.tokens)):
            own = int(self.tokens[place])
            total += own - (int(self.shared[place]) if place > begin else 0)
            longest = max(longest, own)
            yield total if self.packed else longest * (place - begin + 1)


def fewest_pieces(sizes: OrderedSizes, bound: int, most: int) -> int:
    """Returns how many micro-batches of at most `bound` samples and `most` tokens the samples need. One sample that has
    more tokens is a micro-batch by itself."""
    return len(_filled(sizes, bound, most))


def ordered_pieces(sizes: OrderedSizes, count: int, bound: int, most: int) -> list[np.ndarray]:
    """Returns the samples' places in each of `count` micro-batches, of which the fullest has as few tokens as can be.
    Where so many are not needed the last ones are empty. count: the fewest, or more."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if fewest_pieces(sizes, bound, middle) <= count:
            high = middle
        else:
            low = middle + 1
    places, cuts = np.arange(len(sizes.tokens)), np.cumsum(_filled(sizes, bound, high))[:-1]
    found = np.split(places, cuts)
    return found + [places[:0]] * (count - len(found))


def _filled(sizes: OrderedSizes, bound: int, most: int) -> list[int]:
    """Returns the number of samples of each piece: each takes as many as the bounds allow."""
    found: list[int] = []
    while (begin := sum(found)) < len(sizes.tokens):
        size = 0
        for load in sizes.loads(begin):
            if size == bound or (size and load > most):
                break
            size += 1
        found.append(size)
    return found or [0]
