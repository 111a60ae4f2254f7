"""CIFAR-10 in its original form: python pickles, read without running code in them.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. Each batch is a dict with b"data", (10000, 3072) uint8 whose rows
are the red, green and blue planes of 32 x 32, and b"labels"; batches.meta has b"label_names".
"""

from __future__ import annotations

import pickle
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.data.array_store import Writer, stored
from drivetrain.data.source_files import SourceFile
from drivetrain.errors import problem

FORMAT = 1
LEAST_STORED = 1 << 24  # bytes
FOLDER = "cifar-10-batches-py"
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def stored_cifar10(
    root: Path, field: str, split: str, cache: Path
) -> tuple[np.ndarray, np.ndarray, list[str], str | None, str | None]:
    """Reads like `read_cifar10`; images of files of 16 MB and more are mapped from the cache, which all ranks share.

    Returns also a key that identifies the images, and a warning if the cache cannot be used.
    """
    files = [(_folder(root) / name) for name in [*BATCHES[split], "batches.meta"]]
    if not all(file.is_file() for file in files) or sum(file.stat().st_size for file in files) < LEAST_STORED:
        return *read_cifar10(root, field, split), None, None
    sources = [SourceFile(file, field) for file in files]
    key = blake2b(repr([FORMAT, *(source.digest(cache) for source in sources)]).encode(), digest_size=20).hexdigest()

    def build(folder: Path) -> None:
        images, labels, names = read_cifar10(root, field, split)
        with Writer(folder) as writer:
            writer.append("pixels", images)
            writer.append("labels", labels)
            for source in sources:
                source.check_unchanged()
            writer.finish({"classes": names})

    store, warning = stored(cache, f"pictures-{key}", build)
    images = store.array("pixels").view(np.ndarray).reshape(-1, 32, 32, 3)
    return images, store.array("labels").view(np.ndarray), store.facts["classes"], key, warning


def _folder(root: Path) -> Path:
    return root / FOLDER if (root / FOLDER).is_dir() else root


def read_cifar10(root: Path, field: str, split: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Reads a split, "train" or "test": images (N, 32, 32, 3) uint8, labels (N,) int64, class names. Raises UserError
    if broken."""
    root = _folder(root)
    wanted = [*BATCHES[split], "batches.meta"]
    missing = [name for name in wanted if not (root / name).is_file()]
    if missing:
        raise problem(
            field,
            f"{root} lacks {', '.join(missing)}",
            f"give the folder {FOLDER}, unpacked from cifar-10-python.tar.gz",
        )
    *batches, meta = [_unpickled(root / name, field) for name in wanted]
    try:
        names = [name.decode() for name in meta[b"label_names"]]
        rows = np.concatenate([np.asarray(batch[b"data"], dtype=np.uint8) for batch in batches])
        labels = np.concatenate([np.asarray(batch[b"labels"], dtype=np.int64) for batch in batches])
        images = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        why = f"{root} is not in CIFAR-10's python format: {type(error).__name__}: {error}"
        raise problem(field, why, "download it again") from None
    if len(labels) != len(images):
        raise problem(field, f"{root} has {len(images)} images but {len(labels)} labels", "download it again")
    if labels.min() < 0 or labels.max() >= len(names):
        raise problem(field, f"{root} has labels outside 0 to {len(names) - 1}", "download it again")
    return images, labels, names


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds dicts, lists and numpy arrays; any other object in a pickle is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
                return _empty_array
            case "numpy", "ndarray":
                return np.ndarray
            case "numpy", "dtype":
                return _dtype
            case "_codecs", "encode":
                return _encoded
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which such a file does not need")


def _empty_array(_: type, shape: tuple[int, ...], kind: bytes) -> np.ndarray:
    del kind  # the state that follows sets dtype and shape
    return np.ndarray(shape, dtype=np.uint8)


def _dtype(code: str | bytes, *_: object) -> np.dtype:
    """Python 2 wrote the flags as integers, of which NumPy now warns; plain numbers do not need them."""
    dtype = np.dtype(code.decode() if isinstance(code, bytes) else code)
    if dtype.hasobject:
        raise pickle.UnpicklingError("it holds an array of objects")
    return dtype


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it holds bytes encoded as {encoding}")
    return text.encode("latin1")


def _unpickled(file: Path, field: str) -> dict[bytes, Any]:
    try:
        with file.open("rb") as opened:
            held = _ArraysOnly(opened, encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise nearly anything
        reason = f"{type(error).__name__}: {error}"
        raise problem(field, f"{file} is no CIFAR-10 pickle: {reason}", "download it again") from None
    if not isinstance(held, dict):
        raise problem(field, f"{file} holds a {type(held).__name__}, not a dict", "download it again")
    return held
