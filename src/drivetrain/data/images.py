"""Images and labels: bundled digits, class folders, tables of files, CIFAR-10 pickles, parquet files, hub data sets."""

from __future__ import annotations

import functools
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from drivetrain.config.workload import ImageData
from drivetrain.data.cifar import read_cifar10
from drivetrain.data.image_folders import FolderFiles, is_hidden, read_folders
from drivetrain.errors import RunError, problem

EVALUATION_FOLDERS = ("test", "validation", "val", "valid", "dev", "eval", "evaluation")
ORIENTATION = 0x0112  # EXIF: how a camera was held


class Pictures(ABC):
    """Where pixels come from."""

    names: Sequence[str]  # what the user calls each picture

    @abstractmethod
    def pixels(self, index: int, size: int | None) -> np.ndarray:
        """(H, W, C) uint8, C = 1 or 3; as `resized` makes it if size is given. RunError if it cannot be read."""

    @abstractmethod
    def in_memory(self, size: int | None) -> bool:
        """Whether `pixels` only looks up what is decoded already."""

    @abstractmethod
    def dimensions(self, index: int) -> tuple[int, int]:
        """(height, width) before any resizing, without decoding. RunError if it cannot be read."""


@dataclass(frozen=True)
class LabelledPictures:
    """N pictures. labels: (N,) names of classes; classes: their order, where the source knows one."""

    pictures: Pictures
    labels: np.ndarray
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()  # what the user should hear of, such as files left out


class ArrayPictures(Pictures):
    """Decoded already. images: (N, H, W, C) uint8."""

    def __init__(self, images: np.ndarray, names: Sequence[str]) -> None:
        self._images, self.names = images, names

    def pixels(self, index: int, size: int | None) -> np.ndarray:
        image = self._images[index]
        if self.in_memory(size):
            return image
        return _array(resized(Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image), size))

    def in_memory(self, size: int | None) -> bool:
        return size is None or self._images.shape[1:3] == (size, size)

    def dimensions(self, index: int) -> tuple[int, int]:
        del index
        return self._images.shape[1], self._images.shape[2]


class EncodedPictures(Pictures):
    """Image files of any kind PIL reads, on disk or as bytes. `open_file(index)` gives what PIL opens."""

    def __init__(self, open_file: Callable[[int], str | io.BytesIO], names: Sequence[str]) -> None:
        self._open_file, self.names = open_file, names

    def pixels(self, index: int, size: int | None) -> np.ndarray:
        return self._read(index, lambda image: _array(resized(_as_rgb(_upright(image)), size)))

    def in_memory(self, size: int | None) -> bool:
        del size
        return False

    def dimensions(self, index: int) -> tuple[int, int]:
        width, height = self._read(index, _upright_size)
        return height, width

    def _read(self, index: int, read: Callable[[Image.Image], Any]) -> Any:
        try:
            with Image.open(self._open_file(index), formats=readable_formats()) as image:
                return read(image)
        except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error and more
            name = self.names[index]
            reason = str(error).replace(repr(self._open_file(index)), "it") or type(error).__name__
            raise RunError(f"{name} cannot be read as an image: {reason}") from None


def file_pictures(files: Sequence[str], names: Sequence[str]) -> EncodedPictures:
    return EncodedPictures(files.__getitem__, names)


def read_pictures(config: ImageData, path: str | None, field: str, split: str) -> LabelledPictures:
    """Pictures of the run file's source. split: "train" or "test", where the source holds both."""
    match config.source:
        case "digits":
            return _digits()
        case "folder":
            return class_folders(Path(path or "").expanduser(), field, split)
        case "table":
            from drivetrain.data.image_lists import listed_images

            given = listed_images(config, path or "", field, image_suffixes())
            return LabelledPictures(file_pictures(given.files, given.names), given.labels)
        case "cifar10":
            images, numbers, names = read_cifar10(Path(path or "").expanduser(), field, split)
            calls = [f"{split} {i}" for i in range(len(images))]
            return LabelledPictures(ArrayPictures(images, calls), np.array(names)[numbers], tuple(names))
        case "parquet":
            from drivetrain.data.image_tables import parquet_images  # these few import pandas, which takes a while

            table = parquet_images(Path(path or "").expanduser(), field, config, split)
        case "hub":
            from drivetrain.data.image_tables import hub_images

            table = hub_images(path or "", field, config, split)
    assert table.labels is not None
    return LabelledPictures(EncodedPictures(table.open, table.names), table.labels, table.classes)


def pictures_to_predict(config: ImageData, path: str, field: str) -> Pictures:
    """An image, a folder of images at any depth, a parquet file or a folder of them; labels are not needed."""
    given = Path(path).expanduser()
    if not given.exists():
        raise problem(field, f"{path} does not exist", f"paths are taken from the current folder, {Path.cwd()}")
    if given.suffix == ".parquet" or (given.is_dir() and any(given.glob("*.parquet"))):
        from drivetrain.data.image_tables import parquet_images

        table = parquet_images(given, field, config, "test", labelled=False)
        return EncodedPictures(table.open, table.names)
    if given.is_file():
        return file_pictures([str(given)], [path])
    files = read_folders(given, [given], image_suffixes())[given].images
    if not files:
        raise problem(field, f"{path} holds no images", f"images end in {', '.join(sorted(image_suffixes()))}")
    return file_pictures(files, [os.path.relpath(file, given) for file in files])


# --- sources ---------------------------------------------------------------------------------------------------------


def _digits() -> LabelledPictures:
    """scikit-learn's 1,797 handwritten digits of 8 x 8, grey values 0 to 16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    names = [f"digit {i}" for i in range(len(images))]
    return LabelledPictures(ArrayPictures(images, names), digits.target.astype(str), tuple("0123456789"))


def class_folders(root: Path, field: str, split: str) -> LabelledPictures:
    """root/<class>/.../*.png, or root/<split>/<class>/.../*.png, in any format that PIL reads."""
    if not root.is_dir():
        raise problem(field, f"{root} is no folder", f"paths are taken from the current folder, {Path.cwd()}")
    root = _split_folder(root, split)
    tops = sorted(path for path in root.iterdir() if path.is_dir() and not is_hidden(path.name))
    found = read_folders(root, tops, image_suffixes())
    files = [file for each in found.values() for file in each.images]
    labels = [top.name for top, each in found.items() for _ in each.images]
    if not files:
        loose = sum(path.is_file() and path.suffix.lower() in image_suffixes() for path in root.iterdir())
        why = f"{root} holds {loose} images but no class folders with images" if loose else f"{root} holds no images"
        tables = sorted(path.name for path in root.iterdir() if path.suffix.lower() in {".csv", ".tsv", ".jsonl"})
        listed = f", or give source: table and train: {root / tables[0]}" if tables else ""
        raise problem(field, why, f"lay it out as <class>/<image>.png{listed}")
    notes = _notes(root, [*found.values()])
    pictures = file_pictures(files, [os.path.relpath(file, root) for file in files])
    return LabelledPictures(pictures, np.array(labels), notes=notes)


def _split_folder(root: Path, split: str) -> Path:
    """root/train or root/test where root holds splits; root itself where it holds classes."""
    if not (root / "train").is_dir():
        return root
    if split == "train":
        return root / "train"
    return next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), root)


def _notes(root: Path, found: Sequence[FolderFiles]) -> tuple[str, ...]:
    """What was left out, and where the first of each kind lies."""
    others: dict[str, list[str]] = {}
    for file in (file for each in found for file in each.others):
        others.setdefault(os.path.splitext(file)[1].lower() or "without ending", []).append(file)
    notes = []
    if others:
        kinds = ", ".join(f"{len(files)} {ending} ({files[0]} first)" for ending, files in others.items())
        notes.append(f"{sum(map(len, others.values()))} files in {root} are no images and left out: {kinds}")
    repeated = [f"{os.path.relpath(link, root)} → {real}" for each in found for link, real in each.repeated.items()]
    if repeated:
        more = f" and {len(repeated) - 5} more" if len(repeated) > 5 else ""
        shown = ", ".join(repeated[:5]) + more
        notes.append(f"links in {root} that lead to folders which are read anyway, or hold it, are left out: {shown}")
    return tuple(notes)


def image_suffixes() -> frozenset[str]:
    """File endings of the formats that are read."""
    formats = readable_formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in formats)


@functools.cache
def readable_formats() -> tuple[str, ...]:
    """What PIL decodes itself, the usual first: they are tried in this order, and some only by half-reading the file.

    PostScript, whatever its file is called, would be run by another program.
    """
    Image.init()
    usual = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    return *usual, *(kind for kind in Image.OPEN if kind not in {"EPS", "WMF", *usual})


# --- pixels ----------------------------------------------------------------------------------------------------------


def resized(image: Image.Image, size: int | None) -> Image.Image:
    """The shorter side to `size` (bilinear, antialiased), then the middle `size` x `size` cut out."""
    if size is None or image.size == (size, size):
        return image
    width, height = image.size
    shorter = min(width, height)
    scaled = (size * width // shorter, size * height // shorter)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (scaled[0] - size) // 2, (scaled[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def with_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """(H, W, 1 or 3) → (H, W, channels): grey repeated, or colours weighted to grey (ITU-R 601, as PIL does)."""
    if pixels.shape[-1] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=-1)
    return np.asarray(Image.fromarray(pixels).convert("L"))[..., None]


def _upright(image: Image.Image) -> Image.Image:
    """As the camera was held."""
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
