"""Lists the folder of tokenised data, and makes it smaller."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from drivetrain.errors import problem

CONTENTS = "contents.json"  # of a store: written last, so that a folder without it is unfinished
BOUND = "DRIVETRAIN_CACHE_GB"
JUST_USED = 600  # seconds: a run that got the names of arrays maps them within
DAY = 86_400
# names that this project gives: nothing else in the folder is listed or removed
NAMES = {
    re.compile(r"rows-[0-9a-f]{40}"): "rows of a table",
    re.compile(r"tokens-[0-9a-f]{40}"): "tokens of a table",
    re.compile(r"texts-[0-9a-f]{40}"): "tokens of texts",
    re.compile(r"documents-[0-9a-f]{40}"): "documents",
    re.compile(r"conversations-[0-9a-f]{40}"): "conversations",
    re.compile(r"conversation-tokens-[0-9a-f]{40}"): "tokens of conversations",
    re.compile(r"tokenizer-[0-9a-f]{40}"): "tokenizer",
    re.compile(r"listing-[0-9a-f]{40}"): "list of pictures",
    re.compile(r"folders-[0-9a-f]{40}\.json"): "times of folders",
    re.compile(r"tars-[0-9a-f]{40}"): "index of archives",
    re.compile(r"images-[0-9a-f]{40}"): "images of tables",
    re.compile(r"pictures-[0-9a-f]{40}"): "decoded pictures",
    re.compile(r"source-[0-9a-f]{40}\.json"): "digest of a file",
    re.compile(r"reference-[0-9a-f]{40}\.npy"): "log-probabilities under a reference",
    re.compile(r"stream-[0-9a-f]{40}\.jsonl"): "row counts of a stream",
    re.compile(r"[0-9a-f]{40}\.npz"): "tokens of samples",
}


@dataclass(frozen=True)
class Entry:
    """One entry. used: when a run last read it, in seconds since 1970. is_whole: False if a run is building it, or a
    killed run left it for the next to go on from."""

    path: Path
    kind: str
    bytes: int
    used: float
    is_whole: bool


def entries(root: Path) -> list[Entry]:
    """Returns all entries, the longest unused first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        kind = next((kind for name, kind in NAMES.items() if name.fullmatch(path.name)), None)
        if kind is not None and not path.is_symlink():
            with suppress(FileNotFoundError):  # another process removed it
                found.append(_entry(path, kind))
    return sorted(found, key=lambda entry: entry.used)


def _entry(path: Path, kind: str) -> Entry:
    if not path.is_dir():
        state = path.stat()
        return Entry(path, kind, state.st_size, max(state.st_mtime, state.st_atime), True)
    contents = path / CONTENTS  # its time is set by each start that takes the arrays
    used = (contents if contents.exists() else path).stat().st_mtime
    return Entry(path, kind, sum(file.stat().st_size for file in path.iterdir()), used, contents.exists())


def pruned(
    root: Path, unused_seconds: float | None, most_bytes: int | None, just_used: float = 0
) -> tuple[list[Entry], list[Entry]]:
    """Removes entries that were not used for so long, then the longest unused until no more than `most_bytes` are left.

    just_used: seconds; an entry that a run read since then counts as in use.

    Returns the removed entries, and those in use that should have been removed.
    """
    held = entries(root)
    left, now, mapped = sum(entry.bytes for entry in held), time.time(), set(_mapped(root))
    removed, in_use = [], []
    for entry in held:
        too_old = unused_seconds is not None and now - entry.used > unused_seconds
        if not too_old and (most_bytes is None or left <= most_bytes):
            continue
        is_free = entry.path.name not in mapped and now - entry.used >= just_used
        if is_free and _removed(entry, root):
            removed.append(entry)
            left -= entry.bytes
        else:
            in_use.append(entry)
    return removed, in_use


def keep_below_bound(root: Path) -> None:
    """Removes the longest unused entries where the environment bounds the cache, but none that was just used.

    One process does so at a time. Raises UserError for a bound that is no number.
    """
    given = os.environ.get(BOUND, "").strip()
    if not given:
        return
    try:
        most = float(given)
    except ValueError:
        most = -1
    if not 0 <= most < float("inf"):
        raise problem(BOUND, f"{given!r} is no size", "give a number of GB, such as 50, or leave it out")
    with suppress(Timeout, OSError), FileLock(root / "bound.lock").acquire(timeout=0):
        removed, _ = pruned(root, None, int(most * 1e9), JUST_USED)
        if removed:
            size = sum(entry.bytes for entry in removed) / 1e9
            print(f"removed {size:.2f} GB of {root} that was unused longest ({BOUND}={given})", file=sys.stderr)


def _removed(entry: Entry, root: Path) -> bool:
    """Returns whether the entry could be removed: a process that builds it holds its lock."""
    if entry.path.is_file():
        entry.path.unlink(missing_ok=True)
        return True
    lock = FileLock(root / f"{entry.path.name}.lock")
    try:
        with lock.acquire(timeout=0):
            (entry.path / CONTENTS).unlink(missing_ok=True)  # first, so that nothing half removed passes for whole
            shutil.rmtree(entry.path, ignore_errors=True)
    except Timeout:
        return False
    return True


def _mapped(root: Path) -> Iterator[str]:
    """Yields the entries whose arrays a process of this machine has mapped, where the system reports them (Linux)."""
    place = f"{root.resolve()}/"
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            for line in maps.read_text(errors="replace").splitlines():
                _, found, path = line.partition(place)
                if found:
                    yield path.split("/")[0]
