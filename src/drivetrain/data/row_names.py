"""Names of rows, made when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np


class RowNames(Sequence[str]):
    """The names of the rows of these numbers."""

    def __init__(self, rows: Sequence[int] | np.ndarray, kind: str = "row") -> None:
        self._rows, self._kind = rows, kind

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [f"{self._kind} {row}" for row in self._rows[index]]
        return f"{self._kind} {self._rows[index]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]
