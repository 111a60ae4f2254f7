"""Results that took time or money, kept line by line as they come: a run that was killed asks for none again."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from drivetrain.errors import RunError


class Journal:
    """Keeps JSON-able results by a key. Each rank writes a file of its own, and reads those of all.

    folder: None keeps nothing between runs. of: everything that the results depend on beside their keys; results of
    another are not found. Lines that cannot be read, as a kill leaves one, are passed over.
    """

    def __init__(self, folder: Path | None, rank: int, of: str) -> None:
        self._file, self._of = None if folder is None else folder / f"rank-{rank}.jsonl", of
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        for path in sorted(folder.glob("*.jsonl")) if folder is not None else ():
            self._read(path)

    def _read(self, path: Path) -> None:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    key, value = json.loads(line)
                except (ValueError, TypeError):
                    continue
                self._known[key] = value

    def key(self, *parts: Any) -> str:
        """Returns the key of JSON-able parts."""
        return blake2b(json.dumps([self._of, *parts]).encode(), digest_size=16).hexdigest()

    def found(self, key: str) -> Any:
        """Returns the result that was kept, or None."""
        return self._known.get(key)

    def keep_all(self, results: Mapping[str, Any]) -> None:
        """Keeps results by their keys, at once. Raises RunError if they cannot be written. Several threads may call
        it."""
        with self._lock:
            self._known |= results
            if self._file is None or not results:
                return
            try:
                self._file.parent.mkdir(exist_ok=True)
                with self._file.open("a", encoding="utf-8") as file:
                    if file.tell() and not self._ends_whole():
                        file.write("\n")
                    file.write("".join(json.dumps([key, value]) + "\n" for key, value in results.items()))
            except OSError as error:
                raise RunError(f"{self._file} cannot be written: {error.strerror}") from error

    def _ends_whole(self) -> bool:
        """Returns whether the file's last line ended, which one that a kill cut off did not."""
        assert self._file is not None
        with self._file.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"
