"""Texts that lie end to end in a mapped file, each decoded when it is used."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from drivetrain.data.lazy_texts import LazyTexts


class MappedTexts(LazyTexts):
    """UTF-8 texts that lie end to end in a file; `indices`: of these texts among them."""

    def __init__(self, content: np.ndarray, ends: np.ndarray, indices: np.ndarray | None = None) -> None:
        self._content, self._ends, self._indices = content, ends, indices

    def __len__(self) -> int:
        return len(self._ends if self._indices is None else self._indices)

    def text(self, index: int) -> str:
        place = index if self._indices is None else int(self._indices[index])
        start = int(self._ends[place - 1]) if place else 0
        return self._content[start : int(self._ends[place])].tobytes().decode("utf-8", "surrogatepass")

    def texts(self, indices: range) -> list[str]:
        if self._indices is not None or indices.step != 1 or not indices:
            return super().texts(indices)
        ends = [0, *self._ends[: indices.stop].tolist()] if not indices.start else None
        ends = ends or self._ends[indices.start - 1 : indices.stop].tolist()
        held = self._content[ends[0] : ends[-1]].tobytes()
        edges = [end - ends[0] for end in ends]
        return [held[start:stop].decode("utf-8", "surrogatepass") for start, stop in pairwise(edges)]

    def taken(self, indices: np.ndarray) -> MappedTexts:
        return MappedTexts(self._content, self._ends, indices if self._indices is None else self._indices[indices])
