"""Texts that are made when they are asked for: names of a million rows or files take no memory as one sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

import numpy as np


class LazyTexts(Sequence[str]):
    """A sequence of texts, equal to any other that holds the same ones."""

    @abstractmethod
    def text(self, index: int) -> str:
        """Returns one text. index: from 0 to the length - 1."""

    def texts(self, indices: range) -> list[str]:
        """Returns several, for kinds that make many quicker than one by one."""
        return [self.text(index) for index in indices]

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self.texts(range(*index.indices(len(self))))
        return self.text(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def row_name(row: int, line: int = 0) -> str:
    """Names a row of a table. row: counted from 1, without the header. line: of the file, which an editor shows; 0 if
    it has none."""
    return f"line {line} (row {row})" if line else f"row {row}"


class RowNames(LazyTexts):
    """Names of the rows of these numbers: "row 7"."""

    def __init__(self, rows: Sequence[int] | np.ndarray, kind: str = "row") -> None:
        self._rows, self._kind = rows, kind

    def __len__(self) -> int:
        return len(self._rows)

    def text(self, index: int) -> str:
        return f"{self._kind} {self._rows[index]}"


class ChosenTexts(LazyTexts):
    """Some of other texts. indices: (N,), which of them."""

    def __init__(self, texts: Sequence[str], indices: np.ndarray) -> None:
        self._texts, self._indices = texts, indices

    def __len__(self) -> int:
        return len(self._indices)

    def text(self, index: int) -> str:
        return self._texts[int(self._indices[index])]
