"""Pictures as training samples: kept decoded where they fit, cropped and mirrored by (seed, epoch, index) alone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from drivetrain.data.images import Pictures
from drivetrain.errors import Problem, RunError, UserError

MOST_CACHED_BYTES = 512 * 2**20
MOST_REPORTED = 5


@dataclass(frozen=True)
class Augmentation:
    crop_padding: int = 0
    flip: bool = False


class PictureSamples:
    """Samples of (pixels (H, W, C) uint8, label). Training samples are augmented, others are not."""

    def __init__(
        self,
        pictures: Pictures,
        labels: np.ndarray,
        indices: np.ndarray,
        size: int | None,
        augment: Augmentation,
        seed: int,
    ) -> None:
        """indices: which of the pictures these are. labels: (len(indices),), -1 where unknown."""
        self._pictures, self._indices, self.labels = pictures, indices, labels
        self._size, self._augment, self._seed = size, augment, seed
        self._cache: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def names(self) -> Sequence[str]:
        return [self._pictures.names[i] for i in self._indices]

    def load(self, index: int, epoch: int) -> tuple[np.ndarray, int]:
        image = self._image(index)
        if self._augment.crop_padding or self._augment.flip:
            image = self._augmented(image, index, epoch)
        return image, int(self.labels[index])

    def decode_all(self, field: str) -> tuple[int, ...] | None:
        """Decode everything now if it fits in memory; returns the common shape (H, W, C).

        Pictures that cannot be read, and sizes that differ, are told all at once (UserError) instead of one by one in
        the middle of training. If it does not fit, only the first pictures are looked at.
        """
        first = self._checked(range(min(len(self), 256)), field)
        shape = first[0].shape
        if first[0].nbytes * len(self) > MOST_CACHED_BYTES:
            return shape
        rest = self._checked(range(len(first), len(self)), field, shape)
        self._cache = np.stack([*first, *rest])
        return shape

    def _checked(self, indices: range, field: str, shape: tuple[int, ...] | None = None) -> list[np.ndarray]:
        images: list[np.ndarray] = []
        unreadable: list[str] = []
        with ThreadPoolExecutor() as threads:  # PIL decodes outside the interpreter lock
            for image in threads.map(self._image_or_error, indices):
                images.append(image) if isinstance(image, np.ndarray) else unreadable.append(image)
        problems = [Problem(field, why, "remove or replace it") for why in unreadable[:MOST_REPORTED]]
        if len(unreadable) > MOST_REPORTED:
            problems.append(Problem(field, f"{len(unreadable) - MOST_REPORTED} more cannot be read", "look at them"))
        shapes = sorted({image.shape for image in images} | ({shape} if shape else set()))
        if len(shapes) > 1:
            shown = ", ".join(f"{h} x {w} x {c}" for h, w, c in shapes[:4])
            problems.append(Problem("workload.data.image_size", f"images differ in size: {shown}", "give image_size"))
        if problems:
            raise UserError(problems)
        return images

    def _image_or_error(self, index: int) -> np.ndarray | str:
        try:
            return self._image(index)
        except RunError as error:
            return str(error)

    def _image(self, index: int) -> np.ndarray:
        if self._cache is not None:
            return self._cache[index]
        return self._pictures.pixels(int(self._indices[index]), self._size)

    def _augmented(self, image: np.ndarray, index: int, epoch: int) -> np.ndarray:
        top, left, mirror = _draw(self._seed, epoch, index)
        pad = self._augment.crop_padding
        if pad:
            image = _shifted(image, top % (2 * pad + 1) - pad, left % (2 * pad + 1) - pad)
        if self._augment.flip and mirror & 1:
            image = image[:, ::-1]
        return image


def _shifted(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """Zero-padded, then cropped at (pad + down, pad + right): the same as moving the picture."""
    height, width = image.shape[:2]
    moved = np.zeros_like(image)
    rows = slice(max(0, -down), height - max(0, down)), slice(max(0, down), height - max(0, -down))
    columns = slice(max(0, -right), width - max(0, right)), slice(max(0, right), width - max(0, -right))
    moved[rows[0], columns[0]] = image[rows[1], columns[1]]
    return moved


def _draw(seed: int, epoch: int, index: int) -> tuple[int, int, int]:
    """Three 20-bit numbers from a counter: SplitMix64's mixing (Steele et al. 2014) of (seed, epoch, index)."""
    mask = 2**64 - 1
    state = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + index * 0x8CB92BA72F3D8DD7) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    state ^= state >> 31
    return state & 0xFFFFF, (state >> 20) & 0xFFFFF, (state >> 40) & 0xFFFFF
