"""Row counts of a streamed data set's files, kept beside tokenised data so that no later run counts them again.

One file for each list of shards, to which every process adds what it learns: a line of less than a page, written at
once. A count holds for a file of the same name, size and time of change; reading on finds one that is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from drivetrain.data.streams.line_shards import LineShard
from drivetrain.data.streams.remote_shards import RemoteRowsShard


class KeptCounts:
    """Counts of the files of one data set. Without a writable folder nothing is kept, which costs time."""

    def __init__(self, root: Path, shards: Sequence[LineShard | RemoteRowsShard]) -> None:
        self._states = {state: shard for shard in shards if (state := _state(shard)) is not None}
        name = blake2b(json.dumps(sorted(self._states)).encode(), digest_size=20).hexdigest()
        self._file, self._written = root / f"stream-{name}.jsonl", 0
        self._kept: set[str] = set()

    def read(self) -> None:
        """Reads the counts of this run's other processes and of earlier runs."""
        with suppress(OSError):
            for line in self._file.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    found = json.loads(line)
                    shard, rows = self._states[found["file"]], int(found["rows"])
                    if shard.known is None and rows >= 0:
                        shard.known = rows
                    self._kept.add(found["file"])

    def write(self) -> None:
        """Writes counts that are known now and were not kept."""
        new = [state for state, shard in self._states.items() if shard.known is not None and state not in self._kept]
        if not new:
            return
        lines = "".join(json.dumps({"file": state, "rows": self._states[state].known}) + "\n" for state in new)
        self._kept.update(new)
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, lines.encode())
            finally:
                os.close(descriptor)


def _state(shard: LineShard | RemoteRowsShard) -> str | None:
    if shard.copy is not None:
        return shard.copy.state
    assert isinstance(shard, LineShard)
    with suppress(OSError):
        path = shard.path
        found = path.stat()
        return f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"
    return None
