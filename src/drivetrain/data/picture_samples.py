"""Pictures as samples: looked at before training, kept decoded where they fit, augmented by (seed, epoch, index)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from drivetrain.data.augment import Augmentation
from drivetrain.data.images import Pictures, with_channels
from drivetrain.errors import Problem, RunError, UserError

Shape = tuple[int, ...]
MOST_KEPT_BYTES = 512 * 2**20
MOST_LOOKED_AT = 50_000  # larger data sets are sampled: this many headers take some seconds
MOST_REPORTED = 5
PIECE = 64  # pictures a thread takes at a time
# below so many pixels a picture takes longer to open, in the interpreter, than to decode, outside its lock: 10,000 of
# 32 x 32 took 1.8 s on one thread and 2.7 s on two
THREADED_PIXELS = 128 * 128


class PictureSamples:
    """Samples of (pixels (H, W, C) uint8, label). `augment` is given for training samples only."""

    def __init__(
        self,
        pictures: Pictures,
        labels: np.ndarray,
        indices: np.ndarray,
        size: int | None,
        augment: Augmentation | None = None,
    ) -> None:
        """indices: which of the pictures these are. labels: (len(indices),), -1 where unknown."""
        self._pictures, self._indices, self.labels = pictures, indices, labels
        self._size, self._augment = size, augment
        self._shape: Shape | None = None
        self._kept: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def names(self) -> Sequence[str]:
        return [self._name(i) for i in range(len(self))]

    @property
    def kept_bytes(self) -> int:
        """Memory that decoded pictures take."""
        return 0 if self._kept is None else self._kept.nbytes

    def load(self, index: int, epoch: int) -> tuple[np.ndarray, int]:
        image = self._decoded(index) if self._kept is None else self._kept[index]
        if self._augment is not None:
            image = self._augment(image, epoch, index)
        return image, int(self.labels[index])

    def prepare(
        self,
        field: str,
        channels: int | None = None,
        shape: Shape | None = None,
        most_kept_bytes: int = MOST_KEPT_BYTES,
    ) -> Shape:
        """Look at every picture now, and decode them all if they fit. Returns their common shape (H, W, C).

        channels: 1 or 3; left out, as they are. shape: which they must have; left out, the first one's.
        What cannot be read or differs in size is told at once (UserError), not one by one during training. What does
        not fit is looked at by its header; of the largest data sets only MOST_LOOKED_AT, evenly spread.
        """
        self._shape = shape or self._first_shape(field, channels)
        everything = range(len(self))
        if self._pictures.in_memory(self._size):
            found = _in_pieces(self._look, everything[:1], num_threads=1)
        elif math.prod(self._shape) * len(self) <= most_kept_bytes:
            kept = np.empty((len(self), *self._shape), dtype=np.uint8)
            threads = (os.cpu_count() or 1) if math.prod(self._shape[:2]) >= THREADED_PIXELS else 1
            found = _in_pieces(lambda index: self._keep(index, kept), everything, threads)
            self._kept = kept
        else:
            found = _in_pieces(self._look, everything[:: math.ceil(len(self) / MOST_LOOKED_AT)], num_threads=1)
        if found:
            raise UserError(_problems(found, field))
        return self._shape

    def _first_shape(self, field: str, channels: int | None) -> Shape:
        """Of the first picture that can be read."""
        unreadable: list[RunError] = []
        for index in range(len(self)):
            try:
                height, width, own_channels = self._pictures.pixels(int(self._indices[index]), self._size).shape
            except RunError as error:
                unreadable.append(error)
                continue
            return height, width, channels or own_channels
        raise UserError(_problems(unreadable, field))

    def _look(self, index: int) -> None:
        dimensions = self._pictures.dimensions(int(self._indices[index]))
        if self._size is None:
            self._check(index, dimensions)

    def _keep(self, index: int, kept: np.ndarray) -> None:
        kept[index] = self._decoded(index)

    def _decoded(self, index: int) -> np.ndarray:
        image = self._pictures.pixels(int(self._indices[index]), self._size)
        if self._shape is not None:
            self._check(index, image.shape)
            image = with_channels(image, self._shape[-1])
        return image

    def _check(self, index: int, found: Shape) -> None:
        assert self._shape is not None
        if found[:2] != self._shape[:2]:
            raise OtherSize(f"{self._name(index)} is {_shown(found)} where others are {_shown(self._shape)}")

    def _name(self, index: int) -> str:
        return self._pictures.names[self._indices[index]]


class OtherSize(RunError):
    """A picture that does not have the others' size."""


def _in_pieces(look: Callable[[int], None], indices: range, num_threads: int) -> list[RunError]:
    """What `look` finds wrong, in order."""

    def piece(part: Iterable[int]) -> list[RunError]:
        found = []
        for index in part:
            try:
                look(index)
            except RunError as error:
                found.append(error)
        return found

    if num_threads == 1:
        return piece(indices)
    parts = [indices[start : start + PIECE] for start in range(0, len(indices), PIECE)]
    with ThreadPoolExecutor(num_threads) as threads:
        return [error for found in threads.map(piece, parts) for error in found]


def _problems(found: Sequence[RunError], field: str) -> list[Problem]:
    other_size = [error for error in found if isinstance(error, OtherSize)]
    unreadable = [error for error in found if not isinstance(error, OtherSize)]
    problems = [Problem(field, str(error), "remove or replace it") for error in unreadable[:MOST_REPORTED]]
    if len(unreadable) > MOST_REPORTED:
        more = len(unreadable) - MOST_REPORTED
        problems.append(Problem(field, f"{more} more cannot be read", "remove or replace them"))
    if other_size:
        others = f", and {len(other_size) - 1} more" if len(other_size) > 1 else ""
        why = f"images differ in size: {other_size[0]}{others}"
        problems.append(Problem("workload.data.image_size", why, "give the image_size that all are resized to"))
    return problems


def _shown(shape: Shape) -> str:
    return " x ".join(map(str, shape[:2]))
