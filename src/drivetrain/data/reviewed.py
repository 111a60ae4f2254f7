"""Samples of which some may turn out unusable only when they are loaded, in whatever process that is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class Reviewed(ABC):
    """Samples whose batches are looked at in the process that trains."""

    @abstractmethod
    def review(self, indices: Sequence[int], batch: dict[str, Tensor]) -> None:
        """Called with each batch and the samples that it was made of. RunError where it cannot be trained on."""
