"""Samples that come many at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class LoadedTogether(ABC):
    """Samples that lie in one array: a batch of them is one step of indexing, where one by one each costs as much."""

    @abstractmethod
    def load_together(self, indices: Sequence[int]) -> Sequence[Any] | None:
        """Returns what `load` returns for each index in any epoch, as one sequence that `collate` takes; None where
        these have to be loaded one by one."""
