"""Plain text as one stream of token ids, cut into windows of one length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.errors import problem

BYTES = 256  # ids of the byte-level vocabulary


def read_ids(path: Path, tokenizer: Any, field: str) -> np.ndarray:
    """The whole file's ids, int32 (N,). tokenizer: None for the file's own bytes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise problem(field, f"{path} cannot be read: {error.strerror}", "give a text file") from error
    if tokenizer is None:
        return np.frombuffer(content, dtype=np.uint8).astype(np.int32)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise problem(field, f"{path} is no UTF-8: {error.reason} at byte {error.start}", "convert it") from error
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


class TextWindows:
    """Samples: `length` ids and the one after each of them. The last window may be shorter."""

    def __init__(self, ids: np.ndarray, length: int, name: str) -> None:
        self._ids, self._length = ids, length
        self.starts = range(0, max(0, len(ids) - 1), length)
        self.names = [f"{name} from token {start}" for start in self.starts]

    def __len__(self) -> int:
        return len(self.starts)

    def load(self, index: int, epoch: int) -> np.ndarray:
        """(length + 1,), int32."""
        del epoch  # nothing here is random
        start = self.starts[index]
        return self._ids[start : start + self._length + 1]
