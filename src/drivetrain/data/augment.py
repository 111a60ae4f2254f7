"""Random crops and mirroring that depend on (seed, epoch, index) alone: workers and ranks do not matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MASK = 2**64 - 1


@dataclass(frozen=True)
class Augmentation:
    """Crops and mirrors images. crop_padding: pad by so many black pixels, then crop back at a random place. flip:
    mirror half of the images."""

    seed: int
    crop_padding: int = 0
    flip: bool = False

    @property
    def moves(self) -> bool:
        """Whether any image is changed."""
        return bool(self.crop_padding or self.flip)

    def __call__(self, image: np.ndarray, epoch: int, index: int) -> np.ndarray:
        """Augments (H, W, C) → (H, W, C); a view if no pixel moves."""
        if not self.moves:
            return image
        bits = counter_bits(self.seed, epoch, index)
        if self.crop_padding:
            places = 2 * self.crop_padding + 1
            down = ((bits & 0xFFFF) * places >> 16) - self.crop_padding
            right = ((bits >> 16 & 0xFFFF) * places >> 16) - self.crop_padding
            image = shifted(image, down, right)
        if self.flip and bits >> 63:
            image = image[:, ::-1]
        return image


def counter_bits(seed: int, epoch: int, index: int) -> int:
    """Returns 64 random bits for each (seed, epoch, index).

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 16) applied three
    times over; a NumPy generator a sample would cost ten times as much.
    """
    return _mixed(_mixed(_mixed(seed) ^ epoch) ^ index)


def shifted(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """Moves by (down, right) pixels, filling with black: the result of padding and cropping back."""
    if not down and not right:
        return image
    height, width = image.shape[:2]
    top, left = max(0, down), max(0, right)
    seen = image[max(0, -down) : max(0, height - top), max(0, -right) : max(0, width - left)]
    moved = np.zeros_like(image)
    moved[top : top + seen.shape[0], left : left + seen.shape[1]] = seen
    return moved


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
