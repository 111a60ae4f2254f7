"""The last start of each run: the event run_started that a resumed run writes into the middle of a long events.jsonl.

A file is read on from where it was read last, so that a look at a run that works costs what it wrote since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.runtime.strict_json import plain
from drivetrain.tracking.jsonl import parsed

KEPT = 2000  # runs
BLOCK = 1 << 22  # bytes that are read at once
NAME = b'"run_started"'


@dataclass
class _Read:
    """A file as far as it was read. end: of its last whole line."""

    inode: int
    end: int = 0
    start: dict[str, Any] = field(default_factory=dict)


class LastStarts:
    """The files that were looked at last."""

    def __init__(self) -> None:
        self._read: OrderedDict[Path, _Read] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, file: Path) -> dict[str, Any]:
        """Returns the last start in a file of events; {} where there is none."""
        with self._lock:
            try:
                found = file.stat()
                known = self._read.get(file)
                if known is None or known.inode != found.st_ino or found.st_size < known.end:
                    known = self._read[file] = _Read(found.st_ino)
                _read_on(file, known)
            except OSError:
                self._read.pop(file, None)
                return {}
            self._read.move_to_end(file)
            while len(self._read) > KEPT:
                self._read.popitem(last=False)
            return known.start


def _read_on(file: Path, known: _Read) -> None:
    """Reads the lines that came since; one that is not whole yet is left."""
    with file.open("rb") as opened:
        opened.seek(known.end)
        rest = b""
        while block := opened.read(BLOCK):
            lines = rest + block
            whole = lines.rfind(b"\n") + 1
            for line in lines[:whole].split(b"\n") if NAME in lines[:whole] else ():
                event = parsed(line) if NAME in line[:200] else None
                if event is not None and event["event"] == "run_started":
                    known.start = plain(event)
            known.end += whole
            rest = lines[whole:]
