"""Pictures as samples: checked before training, kept decoded where they fit, augmented by (seed, epoch, index)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
import torch

from drivetrain.data.augment import Augmentation
from drivetrain.data.bad_rows import allowance, exceeds
from drivetrain.data.images import Pictures, Unreadable, with_channels
from drivetrain.data.kept_pictures import LEAST_SHARED, Found, Shape, fits, kept_in_memory, kept_on_disk, looked_at
from drivetrain.data.lazy_texts import ChosenTexts
from drivetrain.data.loaded_together import LoadedTogether
from drivetrain.data.reviewed import Reviewed
from drivetrain.errors import Problem, RunError, UserError

LOG = logging.getLogger(__name__)
MOST_KEPT_BYTES = 512 * 2**20
MOST_LOOKED_AT = 5_000  # of more, a sample is looked at: so many headers take half a second
MOST_REPORTED = 5
UNREADABLE = -100  # the label of a picture that cannot be decoded: cross-entropy leaves it out, and so do metrics


class PictureSamples(Reviewed, LoadedTogether):
    """Samples of (pixels (H, W, C) uint8, label). `augment` is set for training samples only.

    A picture that cannot be decoded stays in its place, so that the order of all others is the same whenever it is
    found: it is black and its label UNREADABLE, which counts for nothing. bad: those found so far, with the reasons.
    """

    def __init__(
        self,
        pictures: Pictures,
        labels: np.ndarray,
        indices: np.ndarray,
        size: int | None,
        augment: Augmentation | None = None,
        most_bad: float = 0.0,
        cache: Path | None = None,
    ) -> None:
        """indices: of these samples among the pictures. labels: (len(indices),), -1 where unknown. most_bad: the share
        that may be unreadable. cache: where large sets are kept decoded; None: in memory only."""
        self._pictures, self._indices, self.labels = pictures, indices, labels
        self._size, self._augment = size, augment
        self._most_bad, self._cache = most_bad, cache
        self._shape: Shape | None = None
        self._kept: np.ndarray | None = None
        self._field = "workload.data.train"
        self.bad: dict[int, str] = {}
        self.warning: str | None = None  # where the cache could not be used

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def names(self) -> Sequence[str]:
        return ChosenTexts(self._pictures.names, self._indices)

    @property
    def kept_bytes(self) -> int:
        """Returns the memory of decoded pictures, counted once a machine if they are mapped."""
        return 0 if self._kept is None else self._kept.nbytes

    def load(self, index: int, epoch: int) -> tuple[np.ndarray, int]:
        image = self._read(index)
        if image is None:
            assert self._shape is not None
            return np.zeros(self._shape, np.uint8), UNREADABLE
        if self._augment is not None:
            image = self._augment(image, epoch, index)
        return image, int(self.labels[index])

    def load_together(self, indices: Sequence[int]) -> Sequence[tuple[np.ndarray, int]] | None:
        """Returns decoded pictures that are not augmented by one step of indexing."""
        if self.bad or (self._augment is not None and self._augment.moves):
            return None
        chosen = np.asarray(indices)
        if self._kept is not None:
            pixels = self._kept[chosen]
        else:
            found = self._pictures.together(self._indices[chosen], self._size)
            if found is None or found.shape[1:] != self._shape:  # a single one's channels are made those of the others
                return None
            pixels = found
        return GatheredPictures(pixels, self.labels[chosen])

    def _read(self, index: int) -> np.ndarray | None:
        """Reads a picture; None if it cannot be decoded and need not be."""
        if index in self.bad:
            return None
        if self._kept is not None:
            return self._kept[index]
        try:
            return self._decoded(index)
        except Unreadable as error:
            if not self._most_bad or self._shape is None:
                fix = "remove or replace it, or give workload.data.bad_rows=drop and go on with --resume"
                raise RunError(f"{error}; {fix}") from None
            return None

    def review(self, indices: Sequence[int], batch: dict[str, torch.Tensor]) -> None:
        """Names the pictures of a batch that could not be decoded, once each. Raises RunError if they have become too
        many.

        A worker process that met one cannot report it: it is a process of its own.
        """
        if not self._most_bad or not bool((batch["labels"] == UNREADABLE).any()):
            return
        for index in indices:
            if index not in self.bad and self._read(index) is None:
                for _, error in looked_at(self._decoded, [index]):
                    self.bad[index] = str(error)
                    LOG.warning("%s; it counts for nothing", error)
        if exceeds(len(self.bad), len(self), self._most_bad):
            first = next(iter(self.bad.values()))
            why = (
                f"{len(self.bad):,} of {len(self):,} pictures cannot be read, more than workload.data.bad_rows lets go"
            )
            raise RunError(f"{why}: {first}; remove them, or {allowance(len(self.bad), len(self))}")

    def prepare(
        self,
        field: str,
        channels: int | None = None,
        shape: Shape | None = None,
        most_kept_bytes: int = MOST_KEPT_BYTES,
    ) -> Shape:
        """Checks the pictures, and decodes them all if they fit. Returns their common shape (H, W, C).

        channels: 1 or 3; by default unchanged. shape: the required one; by default the first one's. Raises UserError
        with all pictures that are unreadable or of another size at once, not one by one during training. If the set
        does not fit in memory, only headers are checked: MOST_LOOKED_AT of them, evenly spread.
        """
        self._field = field
        self._shape = shape or self._first_shape(field, channels)
        if self._pictures.in_memory(self._size):
            self._check_found(looked_at(self._look, range(min(1, len(self)))), 1)
        elif fits(len(self), self._shape, most_kept_bytes):
            self._keep()
        else:
            some = range(0, len(self), math.ceil(len(self) / MOST_LOOKED_AT))
            self._check_found(looked_at(self._look, some), len(some))
        return self._shape

    def _keep(self) -> None:
        assert self._shape is not None
        count, shape = len(self), self._shape

        def check(found: Found) -> None:
            self._check_found(found, count)

        large = math.prod(shape) * count >= LEAST_SHARED and self._cache is not None
        identity = self._pictures.identity(self._indices) if large else None
        if identity is None or self._cache is None:
            self._kept, _ = kept_in_memory(self._decoded, count, shape, check)
            return
        described = f"{identity} {self._size}"
        self._kept, found, self.warning = kept_on_disk(self._decoded, count, shape, check, described, self._cache)
        check(found)  # another run may have let more go

    def _check_found(self, found: Found, looked: int) -> None:
        """Remembers pictures that cannot be decoded. Raises UserError for too many of them, and for other sizes."""
        unreadable = [error for _, error in found if isinstance(error, Unreadable)]
        too_many = exceeds(len(unreadable), looked, self._most_bad)
        if too_many or len(unreadable) < len(found):
            raise UserError(_problems([error for _, error in found], self._field, looked, self._most_bad))
        self.bad |= {index: str(error) for index, error in found}

    def _first_shape(self, field: str, channels: int | None) -> Shape:
        """Returns the shape of the first picture that can be read."""
        unreadable: list[RunError] = []
        for index in range(len(self)):
            try:
                height, width, own_channels = self._pictures.pixels(int(self._indices[index]), self._size).shape
            except RunError as error:
                unreadable.append(error)
                continue
            return height, width, channels or own_channels
        raise UserError(_problems(unreadable, field, len(self), 0.0))

    def _look(self, index: int) -> None:
        dimensions = self._pictures.dimensions(int(self._indices[index]))
        if self._size is None:
            self._check(index, dimensions)

    def _decoded(self, index: int) -> np.ndarray:
        image = self._pictures.pixels(int(self._indices[index]), self._size)
        if self._shape is not None:
            self._check(index, image.shape)
            image = with_channels(image, self._shape[-1])
        return image

    def _check(self, index: int, found: Shape) -> None:
        assert self._shape is not None
        if found[:2] != self._shape[:2]:
            raise OtherSize(f"{self.names[index]} is {_shown(found)} where others are {_shown(self._shape)}")


class OtherSize(RunError):
    """A picture that does not have the others' size."""


class GatheredPictures(Sequence[tuple[np.ndarray, int]]):
    """Samples that were taken out of one array together. pixels: (B, H, W, C) uint8; labels: (B,)."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> tuple[np.ndarray, int]: ...

    @overload
    def __getitem__(self, index: slice) -> GatheredPictures: ...

    def __getitem__(self, index: int | slice) -> tuple[np.ndarray, int] | GatheredPictures:
        if isinstance(index, slice):
            return GatheredPictures(self.pixels[index], self.labels[index])
        return self.pixels[index], int(self.labels[index])


def _problems(found: Sequence[RunError], field: str, looked: int, most_bad: float) -> list[Problem]:
    other_size = [error for error in found if isinstance(error, OtherSize)]
    unreadable = [error for error in found if not isinstance(error, OtherSize)]
    fix = f"remove or replace it, or {allowance(len(unreadable), looked)}" if most_bad else "remove or replace it"
    problems = [Problem(field, str(error), fix) for error in unreadable[:MOST_REPORTED]]
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
