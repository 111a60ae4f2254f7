"""Images and labels: bundled digits, class folders, CIFAR-10 pickles, parquet files, hub data sets."""

from __future__ import annotations

import difflib
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from drivetrain.config.workload import ImageData
from drivetrain.data.tables import import_datasets
from drivetrain.errors import RunError, problem

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


class Pictures(ABC):
    """Where pixels come from."""

    names: Sequence[str]  # what the user calls each picture

    @abstractmethod
    def pixels(self, index: int, size: int | None) -> np.ndarray:
        """(H, W, C) uint8, resized to (size, size) if size is given."""


@dataclass(frozen=True)
class LabelledPictures:
    """N pictures. labels: (N,) as strings, None where they are not known."""

    pictures: Pictures
    labels: np.ndarray


class ArrayPictures(Pictures):
    """Decoded already. images: (N, H, W, C) uint8."""

    def __init__(self, images: np.ndarray, names: Sequence[str]) -> None:
        self._images, self.names = images, names

    def pixels(self, index: int, size: int | None) -> np.ndarray:
        image = self._images[index]
        if size is None or image.shape[:2] == (size, size):
            return image
        return _resized(Image.fromarray(image.squeeze()), size)


class FilePictures(Pictures):
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.names = [str(file) for file in files]

    def pixels(self, index: int, size: int | None) -> np.ndarray:
        return _decoded(self._files[index], str(self._files[index]), size)


class EncodedPictures(Pictures):
    """PNG or JPEG bytes, as parquet files hold them."""

    def __init__(self, encoded: Sequence[bytes], names: Sequence[str]) -> None:
        self._encoded, self.names = encoded, names

    def pixels(self, index: int, size: int | None) -> np.ndarray:
        return _decoded(io.BytesIO(self._encoded[index]), self.names[index], size)


def read_pictures(config: ImageData, path: str | None, field: str, split: str) -> LabelledPictures:
    """Pictures of the run file's source. split: "train" or "test", where the source holds both."""
    match config.source:
        case "digits":
            return _digits()
        case "folder":
            return class_folders(Path(path or ""), field, split)
        case "cifar10":
            return _cifar10(Path(path or ""), field, split)
        case "parquet":
            return _parquet(Path(path or ""), field, config, labelled=True)
    return _from_hub(path or "", field, config, split)


def pictures_to_predict(config: ImageData, path: str, field: str) -> Pictures:
    """A folder of image files, at any depth, or a parquet file; labels are not needed."""
    given = Path(path)
    if given.suffix == ".parquet":
        return _parquet(given, field, config, labelled=False).pictures
    if given.is_file() and given.suffix.lower() in SUFFIXES:
        return FilePictures([given])
    files = sorted(file for file in given.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise problem(field, f"{path} holds no images", f"images end in {', '.join(sorted(SUFFIXES))}")
    return FilePictures(files)


def _digits() -> LabelledPictures:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    return LabelledPictures(
        ArrayPictures(images, [f"digit {i}" for i in range(len(images))]), digits.target.astype(str)
    )


def class_folders(root: Path, field: str, split: str) -> LabelledPictures:
    """root/<class>/*.png, or root/<split>/<class>/*.png."""
    if not root.is_dir():
        raise problem(field, f"{root} is no folder", f"paths are taken from the current folder, {Path.cwd()}")
    if (root / split).is_dir():
        root = root / split
    files, labels = [], []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        found = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
        files += found
        labels += [folder.name] * len(found)
    if not files:
        raise problem(field, f"{root} holds no class folders with images", "lay it out as <class>/<image>.png")
    return LabelledPictures(FilePictures(files), np.array(labels))


class _ArraysOnly(pickle.Unpickler):
    """CIFAR's pickles hold dicts, lists and numpy arrays; whatever else a pickle asks for is refused, not run."""

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _cifar10(root: Path, field: str, split: str) -> LabelledPictures:
    if (root / "cifar-10-batches-py").is_dir():
        root = root / "cifar-10-batches-py"
    batches = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    missing = [name for name in (*batches, "batches.meta") if not (root / name).is_file()]
    if missing:
        raise problem(field, f"{root} lacks {', '.join(missing)}", "give the folder cifar-10-batches-py")
    read = [_unpickled(root / name, field) for name in batches]
    names = [name.decode() for name in _unpickled(root / "batches.meta", field)[b"label_names"]]
    try:
        rows = np.concatenate([batch[b"data"] for batch in read])
        images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        numbers = np.concatenate([batch[b"labels"] for batch in read])
    except (KeyError, ValueError, TypeError) as error:
        raise problem(field, f"{root} is not in CIFAR-10's python format: {error}", "download it again") from None
    if numbers.min() < 0 or numbers.max() >= len(names):
        raise problem(field, f"{root} has labels outside 0 to {len(names) - 1}", "download it again")
    calls = [f"{split} {i}" for i in range(len(images))]
    return LabelledPictures(ArrayPictures(np.ascontiguousarray(images), calls), np.array(names)[numbers])


def _unpickled(file: Path, field: str) -> Any:
    try:
        with file.open("rb") as opened:
            return _ArraysOnly(opened, encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise problem(field, f"{file} is no CIFAR-10 pickle: {error}", "download it again") from None


def _parquet(path: Path, field: str, config: ImageData, labelled: bool) -> LabelledPictures:
    import pandas as pd
    import pyarrow

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise problem(field, f"{path} is no parquet file, nor a folder of them", "give one that exists")
    try:
        table = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise problem(field, f"{path} cannot be read: {error}", "give a whole parquet file") from None
    columns = [config.image_column] + ([config.label_column] if labelled else [])
    _check_columns(list(table.columns), columns, str(path))
    encoded = [value["bytes"] if isinstance(value, dict) else value for value in table[config.image_column]]
    if not all(isinstance(value, bytes) for value in encoded):
        raise problem(field, f"{path}: {config.image_column} holds no image bytes", "give the column of images")
    labels = table[config.label_column].astype(str).to_numpy() if labelled else np.full(len(table), "", dtype=object)
    return LabelledPictures(EncodedPictures(encoded, [f"row {i + 1}" for i in range(len(table))]), labels)


def _check_columns(names: list[str], wanted: list[str], path: str) -> None:
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            fix = f"did you mean {near[0]}?" if near else f"it has: {', '.join(names)}"
            raise problem("workload.data", f"{path} has no column {name!r}", fix)


def _from_hub(name: str, field: str, config: ImageData, split: str) -> LabelledPictures:
    datasets = import_datasets(field)
    try:
        held = datasets.load_dataset(name, split=split)
    except Exception as error:  # network, missing data set, missing split: many kinds
        raise problem(
            field,
            f"{name} cannot be had from the hub: {str(error).splitlines()[0][:200]}",
            "without a network: download the data elsewhere and give the folder with source: parquet or folder",
        ) from error
    _check_columns(held.column_names, [config.image_column, config.label_column], name)
    feature = held.features[config.label_column]
    numbers = held[config.label_column]
    labels = [feature.int2str(n) if hasattr(feature, "int2str") else str(n) for n in numbers]
    raw = held.cast_column(config.image_column, datasets.Image(decode=False))
    encoded = [value["bytes"] for value in raw[config.image_column]]
    return LabelledPictures(EncodedPictures(encoded, [f"row {i + 1}" for i in range(len(held))]), np.array(labels))


def _decoded(file: Any, name: str, size: int | None) -> np.ndarray:
    try:
        with Image.open(file) as image:
            return _resized(image.convert("RGB"), size)
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise RunError(f"{name} is no image that can be read: {error}. Remove or replace it") from None


def _resized(image: Image.Image, size: int | None) -> np.ndarray:
    """The shorter side to `size`, then the middle cut out."""
    if size is not None and image.size != (size, size):
        width, height = image.size
        ratio = size / min(width, height)
        scaled = (max(size, round(width * ratio)), max(size, round(height * ratio)))
        image = image.resize(scaled, Image.Resampling.BILINEAR)
        left, top = (scaled[0] - size) // 2, (scaled[1] - size) // 2
        image = image.crop((left, top, left + size, top + size))
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels
