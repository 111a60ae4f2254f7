"""Samples some of which may prove unusable only when they are loaded, in any process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class Reviewed(ABC):
    """Samples whose batches are checked in the process that trains."""

    @abstractmethod
    def review(self, indices: Sequence[int], batch: dict[str, Tensor]) -> None:
        """Called with each batch and its samples. Raises RunError if it cannot be trained on."""
