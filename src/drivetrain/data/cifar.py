"""CIFAR-10 in its original form: python pickles, read without running what a pickle may ask for.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. Each batch is a dict with b"data", (10000, 3072) uint8 whose rows
are the red, green and blue planes of 32 x 32, and b"labels"; batches.meta has b"label_names".
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.errors import problem

FOLDER = "cifar-10-batches-py"
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def read_cifar10(root: Path, field: str, split: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """split: "train" or "test" → images (N, 32, 32, 3) uint8, labels (N,) int64, class names. UserError if broken."""
    if (root / FOLDER).is_dir():
        root = root / FOLDER
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
    """Rebuilds dicts, lists and numpy arrays; whatever else a pickle asks for is refused, not run."""

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
    """Python 2 wrote the flags as integers, which NumPy now warns of; they say nothing that plain numbers need."""
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
