"""Pictures and their pixels: reads them, turns them upright, resizes them, and converts them to grey or RGB."""

from __future__ import annotations

import base64
import functools
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from drivetrain.errors import RunError

ORIENTATION = 0x0112  # EXIF: how a camera was held


class Unreadable(RunError):
    """A picture that no process can decode; a failure on the way to it, such as a lost disk, is another RunError."""


class Pictures(ABC):
    """A source of pixels."""

    names: Sequence[str]  # what the user calls each picture

    @abstractmethod
    def pixels(self, index: int, size: int | None) -> np.ndarray:
        """Returns (H, W, C) uint8, C = 1 or 3; resized as by `resized` if size is passed. Raises RunError if it cannot
        be read."""

    @abstractmethod
    def in_memory(self, size: int | None) -> bool:
        """Returns whether `pixels` only looks up decoded pixels."""

    @abstractmethod
    def dimensions(self, index: int) -> tuple[int, int]:
        """Returns (height, width) before any resizing, without decoding. Raises RunError if it cannot be read."""

    def together(self, indices: np.ndarray, size: int | None) -> np.ndarray | None:
        """Returns `pixels` of many, (len(indices), H, W, C); None where they do not lie in one array."""
        del indices, size
        return None

    def identity(self, indices: np.ndarray) -> str | None:
        """Returns a text that identifies these pictures' pixels, so that they need not be decoded again; None if
        nothing does."""
        del indices
        return None


@dataclass(frozen=True)
class LabelledPictures:
    """N pictures. numbers: (N,) of their labels among `label_names`; classes: the order of classes, where the source
    knows one; notes: remarks for the user, such as files that were left out."""

    pictures: Pictures
    numbers: np.ndarray
    label_names: Sequence[str]
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def labels(self) -> np.ndarray:
        """The names of the labels, (N,)."""
        return np.array(self.label_names)[self.numbers]


def labelled(
    pictures: Pictures, labels: np.ndarray, classes: tuple[str, ...] | None = None, notes: tuple[str, ...] = ()
) -> LabelledPictures:
    """Numbers the labels. labels: (N,) names of classes."""
    names, numbers = np.unique(labels, return_inverse=True)
    return LabelledPictures(pictures, numbers.astype(np.int32), [str(name) for name in names], classes, notes)


class ArrayPictures(Pictures):
    """Pictures that are decoded already. images: (N, H, W, C) uint8. key: identifies all of them, if anything does."""

    def __init__(self, images: np.ndarray, names: Sequence[str], key: str | None = None) -> None:
        self._images, self.names, self._key = images, names, key

    def pixels(self, index: int, size: int | None) -> np.ndarray:
        image = self._images[index]
        if self.in_memory(size):
            return image
        return _array(resized(Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image), size))

    def in_memory(self, size: int | None) -> bool:
        return size is None or self._images.shape[1:3] == (size, size)

    def together(self, indices: np.ndarray, size: int | None) -> np.ndarray | None:
        return self._images[indices] if self.in_memory(size) else None

    def dimensions(self, index: int) -> tuple[int, int]:
        del index
        return self._images.shape[1], self._images.shape[2]

    def identity(self, indices: np.ndarray) -> str | None:
        return self._key and digest_of(self._key, indices)


class EncodedPictures(Pictures):
    """Image files of any kind PIL reads, on disk or as bytes. `open_file(index)` returns a file or path for PIL to
    open.

    key: identifies the content of all of them, if anything does. formats: that are read; None: all of
    `readable_formats`.
    """

    def __init__(
        self,
        open_file: Callable[[int], str | io.BytesIO],
        names: Sequence[str],
        key: str | None = None,
        formats: tuple[str, ...] | None = None,
    ) -> None:
        self._open_file, self.names, self._key, self._formats = open_file, names, key, formats

    def pixels(self, index: int, size: int | None) -> np.ndarray:
        return self._read(index, lambda image: _array(resized(_as_rgb(_upright(image)), size)))

    def in_memory(self, size: int | None) -> bool:
        del size
        return False

    def dimensions(self, index: int) -> tuple[int, int]:
        width, height = self._read(index, _upright_size)
        return height, width

    def identity(self, indices: np.ndarray) -> str | None:
        return self._key and digest_of(self._key, indices)

    def _read(self, index: int, read: Callable[[Image.Image], Any]) -> Any:
        try:
            with Image.open(self._open_file(index), formats=self._formats or readable_formats()) as image:
                return read(image)
        except RunError:
            raise
        except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error and more
            unknown = isinstance(error, UnidentifiedImageError)  # its text repeats the path
            lost = isinstance(error, OSError) and error.strerror  # the system's: no file, no permission, no disk
            reason = "cannot identify image file it" if unknown else lost or str(error) or type(error).__name__
            raise (RunError if lost else Unreadable)(
                f"{self.names[index]} cannot be read as an image: {reason}"
            ) from None


class FilePictures(EncodedPictures):
    """Image files, each by its path."""

    def __init__(self, files: Sequence[str], names: Sequence[str]) -> None:
        super().__init__(files.__getitem__, names)
        self._files = files

    def identity(self, indices: np.ndarray) -> str | None:
        """Identifies the pictures by each file's path, size and time of change."""
        digest = blake2b(digest_size=20)
        try:
            for index in indices.tolist():
                file = self._files[index]
                found = os.stat(file)
                digest.update(
                    f"{os.path.abspath(file)}\0{found.st_size} {found.st_mtime_ns}\n".encode("utf-8", "replace")
                )
        except OSError:  # reading it says why
            return None
        return digest.hexdigest()


def file_pictures(files: Sequence[str], names: Sequence[str]) -> FilePictures:
    return FilePictures(files, names)


def digest_of(key: str, indices: np.ndarray) -> str:
    return blake2b(key.encode() + np.asarray(indices, np.int64).tobytes(), digest_size=20).hexdigest()


def image_suffixes() -> frozenset[str]:
    """Returns the file endings of the formats that are read."""
    formats = readable_formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in formats)


@functools.cache
def readable_formats() -> tuple[str, ...]:
    """Returns formats that PIL decodes itself, the usual first: they are tried in this order, and some only by
    half-reading the file.

    PostScript is never read, since another program would run it, whatever the file's ending.
    """
    Image.init()
    usual = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    return *usual, *(kind for kind in Image.OPEN if kind not in {"EPS", "WMF", *usual})


# --- pixels ----------------------------------------------------------------------------------------------------------


def resized(image: Image.Image, size: int | None) -> Image.Image:
    """Resizes the shorter side to `size` (bilinear, antialiased), then cuts out the middle `size` x `size`."""
    if size is None or image.size == (size, size):
        return image
    width, height = image.size
    shorter = min(width, height)
    scaled = (size * width // shorter, size * height // shorter)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (scaled[0] - size) // 2, (scaled[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def with_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Converts (H, W, 1 or 3) → (H, W, channels): grey repeated, or colours weighted to grey (ITU-R 601, as in PIL)."""
    if pixels.shape[-1] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=-1)
    return np.asarray(Image.fromarray(pixels).convert("L"))[..., None]


def _upright(image: Image.Image) -> Image.Image:
    """Turns a picture as the camera was held."""
    return ImageOps.exif_transpose(image) if image.getexif().get(ORIENTATION, 1) != 1 else image


def _upright_size(image: Image.Image) -> tuple[int, int]:
    lying = image.getexif().get(ORIENTATION, 1) in {5, 6, 7, 8}
    return (image.size[1], image.size[0]) if lying else image.size


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # PIL would cut off all above 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in {"I", "F"}:
        raise ValueError(f"its pixels are of 32 bits (mode {image.mode}); convert it to 8 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, PIL warns of the transparency
    return image.convert("RGB")


def _array(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def png_url(pixels: np.ndarray) -> str:
    """Returns a picture (H, W, C) uint8, C = 1 or 3, as the data URL of a PNG."""
    content = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
