"""Results that took time or money, kept line by line as they come: a run that was killed asks for none again.

A line is [step, key, result]. Lines of steps before a checkpoint that would be resumed from are removed now and then,
so that the files do not grow with the length of the run.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from drivetrain.runtime import storage
from drivetrain.runtime.atomic_file import writing


class Journal:
    """Keeps JSON-able results by a key. Each rank writes a file of its own, and reads those of all.

    folder: None keeps nothing between runs. of: everything that the results depend on beside their keys; results of
    another are not found. world: the number of ranks; the first one also shortens the files of ranks that an earlier
    start had and this one lacks. Lines that cannot be read, as a kill leaves one, are passed over.
    """

    def __init__(self, folder: Path | None, rank: int, of: str, world: int = 1) -> None:
        self._folder, self._rank, self._world, self._of = folder, rank, world, of
        self._file = None if folder is None else folder / f"rank-{rank}.jsonl"
        self._lock = threading.Lock()
        self._step = self._shortened = 0
        self._ends_whole = False  # whether the file's last line is known to have ended
        self.is_again = False  # whether an earlier start began this step
        self._asked_again: Counter[str] = Counter()
        self._known: dict[str, tuple[int, Any]] = {}
        for path in self._files():
            with suppress(FileNotFoundError):  # another rank, which is quicker, has removed it
                self._known |= {key: (step, value) for step, key, value, _ in _lines(path)}

    def _files(self) -> list[Path]:
        entries = [] if self._folder is None else storage.entries(self._folder)
        return [path for path in entries if _rank_of(path) >= 0]

    def key(self, *parts: Any) -> str:
        """Returns the key of JSON-able parts."""
        return blake2b(json.dumps([self._of, *parts]).encode(), digest_size=16).hexdigest()

    def found(self, key: str) -> Any:
        """Returns the result that was kept, or None."""
        return self._known.get(key, (0, None))[1]

    def begin(self, step: int, covered: int) -> None:
        """Begins a step: results that are kept from now on are its own, and those of earlier steps are not found any
        more. Removes lines of steps before `covered`, which no resumed run makes again. Raises RunError if a file
        cannot be written."""
        self._step = step
        self._known = {key: kept for key, kept in self._known.items() if kept[0] >= step}
        self.is_again = any(kept[0] == step for kept in self._known.values())
        if covered <= self._shortened:
            return
        self._shortened = covered
        for path in self._files():
            if path == self._file or (self._rank == 0 and _rank_of(path) >= self._world):
                _shorten(path, covered)

    def count_again(self, what: str, number: int) -> None:
        """Counts what is asked for again, and may have another result this time."""
        self._asked_again[what] += number

    def counted_again(self) -> dict[str, int]:
        """Returns what was counted since the last call."""
        found, self._asked_again = self._asked_again, Counter()
        return {what: number for what, number in found.items() if number}

    def keep_all(self, results: Mapping[str, Any]) -> None:
        """Keeps results by their keys, at once. Raises RunError if they cannot be written. Several threads may call
        it."""
        with self._lock:
            self._known |= {key: (self._step, value) for key, value in results.items()}
            if self._file is None or not results:
                return
            text = "".join(json.dumps([self._step, key, value]) + "\n" for key, value in results.items())
            with writing(self._file):
                if not self._ends_whole:
                    storage.make(self._file.parent)
                    storage.end_line(self._file)
                    self._ends_whole = True
                storage.append(self._file, text.encode())


def _lines(path: Path) -> Iterator[tuple[int, str, Any, bytes]]:
    """Yields (step, key, result, the line) of the lines that can be read."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                step, key, value = json.loads(line)
            except (ValueError, TypeError):
                continue
            if line.endswith(b"\n") and isinstance(step, int) and isinstance(key, str):
                yield step, key, value, line


def _shorten(path: Path, step: int) -> None:
    """Removes the lines of steps before `step`; a file that would be empty goes."""
    with writing(path):
        if any(found >= step for found, *_ in _lines(path)):
            storage.rewrite(path, (line for found, _, _, line in _lines(path) if found >= step))
        else:
            storage.remove(path)


def _rank_of(path: Path) -> int:
    """Returns the rank that wrote a file; -1 for a file of another name."""
    number = path.stem.removeprefix("rank-")
    return int(number) if path.suffix == ".jsonl" and number.isdecimal() else -1
