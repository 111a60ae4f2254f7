"""Copies shards for a process that reads a stream: `python -m drivetrain.data.streams.shard_copier BUCKET`.

Reads one request a line, answers with one line each, in their order, and ends with its input.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from drivetrain.errors import UserError, last_line
from drivetrain.runtime.downloads import Store, download
from drivetrain.runtime.object_store import Entry, StoreError
from drivetrain.runtime.store_cache import bound_bytes, store_of


def main(bucket: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which the whole group gets: they are for the process that reads
        signal.signal(number, signal.SIG_IGN)
    store: Store | None = None
    for line in sys.stdin:
        request, why = json.loads(line), ""
        try:
            store = store or store_of(bucket)
            copy(store, Entry(request["path"], request["bytes"], request["tag"], 0.0), Path(request["file"]))
        except (StoreError, UserError) as error:
            why = str(error)
        except OSError as error:
            why = f"{request['file']}: {last_line(error)}"
        sys.stdout.write(json.dumps({"file": request["file"], "why": why}) + "\n")
        sys.stdout.flush()


def copy(store: Store, entry: Entry, file: Path) -> None:
    """Makes a copy, unless another process of the machine has made it. Raises StoreError and OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.parent / "copying.lock"):
        if not file.exists():
            make_room(file.parent, entry.bytes)
            download(store, entry, file)


def make_room(folder: Path, wanted: int) -> None:
    """Removes the copies that were read longest ago, so that one of so many bytes fits within the bound. A process that
    still has one open reads on in it."""
    files = []
    for file in folder.iterdir():
        with suppress(OSError):
            if file.suffix != ".lock":
                files.append((file.stat().st_mtime, file.stat().st_size, file))
    excess = sum(size for _, size, _ in files) + wanted - bound_bytes()
    for _, size, file in sorted(files):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= size


if __name__ == "__main__":
    main(sys.argv[1])
