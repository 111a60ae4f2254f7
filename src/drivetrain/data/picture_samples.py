"""Pictures as samples: looked at before training, kept decoded where they fit, augmented by (seed, epoch, index)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from drivetrain.data.augment import Augmentation
from drivetrain.data.images import Pictures, with_channels
from drivetrain.errors import Problem, RunError, UserError

MOST_KEPT_BYTES = 512 * 2**20
MOST_LOOKED_AT = 50_000  # headers of larger data sets are sampled: 50,000 take some seconds
MOST_REPORTED = 5
PIECE = 64  # pictures one thread takes at a time


class PictureSamples:
    """Samples of (pixels (H, W, C) uint8, label). `augment` is given for training samples only."""

    def __init__(
        self,
        pictures: Pictures,
        labels: np.ndarray,
        indices: np.ndarray,
        size: int | None,
        channels: int | None = None,
        augment: Augmentation | None = None,
    ) -> None:
        """indices: which of the pictures these are. labels: (len(indices),), -1 where unknown. channels: 1 or 3."""
        self._pictures, self._indices, self.labels = pictures, indices, labels
        self._size, self._channels, self._augment = size, channels, augment
        self._shape: tuple[int, ...] | None = None
        self._kept: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def names(self) -> Sequence[str]:
        return [self._pictures.names[i] for i in self._indices]

    @property
    def kept_bytes(self) -> int:
        """Memory that decoded pictures take."""
        return 0 if self._kept is None else self._kept.nbytes

    def load(self, index: int, epoch: int) -> tuple[np.ndarray, int]:
        image = self._kept[index] if self._kept is not None else self._pixels(index)
        if image.shape != self._shape and self._shape is not None:
            raise RunError(f"{self._name(index)} is {_shown(image.shape)}, not {_shown(self._shape)}; give image_size")
        if self._augment is not None:
            image = self._augment(image, epoch, index)
        return image, int(self.labels[index])

    def prepare(self, field: str, most_kept_bytes: int = MOST_KEPT_BYTES) -> tuple[int, ...]:
        """Look at every picture now; decode them all if they fit. Returns their common shape (H, W, C).

        Whatever cannot be read or differs in size is told at once (UserError), not one by one during training. What
        does not fit is looked at by its header, the largest data sets in a sample of MOST_LOOKED_AT.
        """
        shape = self._first_shape(field)
        if self._pictures.in_memory(self._size):
            looked_at, look = range(0), self._keep(None)
        elif int(np.prod(shape)) * len(self) <= most_kept_bytes:
            kept = np.empty((len(self), *shape), dtype=np.uint8)
            looked_at, look = range(len(self)), self._keep(kept)
        else:
            kept = None
            looked_at, look = range(0, len(self), -(-len(self) // MOST_LOOKED_AT)), self._look
        unreadable, shapes = _in_pieces(look, looked_at)
        problems = [Problem(field, why, "remove or replace it") for why in unreadable[:MOST_REPORTED]]
        if len(unreadable) > MOST_REPORTED:
            more = len(unreadable) - MOST_REPORTED
            problems.append(Problem(field, f"{more} more images cannot be read", "remove or replace them"))
        problems += self._of_one_size(shapes, field)
        if problems:
            raise UserError(problems)
        self._shape = shape
        return shape
