"""Local copies of what a run reads from stores: SCHEME/BUCKET/KEY below one folder, so that paths and addresses can be
turned into one another.

A source is what a run file names: an object, a folder or a pattern. Its record holds the size and tag of each object,
so that only what changed is fetched again. The cache has a bound: sources that were used longest ago are removed, but
none that a process of this machine uses, whose lock the kernel releases when that process ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from drivetrain.errors import problem
from drivetrain.runtime.atomic_file import write_whole
from drivetrain.runtime.downloads import Store, download
from drivetrain.runtime.hub_store import HubStore, repository_of
from drivetrain.runtime.notices import Notify
from drivetrain.runtime.object_store import Entry, ObjectStore
from drivetrain.runtime.user_cache import user_cache

try:
    import fcntl
except ImportError:  # systems that are not POSIX
    fcntl = None  # type: ignore[assignment]

BOUND = "DRIVETRAIN_STORE_CACHE_GB"
USUAL_GB = 100.0
RECORDS = ".sources"
MOST_SHOWN = 5  # missing objects
MOST_LOOK_UPS = 16  # of names, beyond which what they have in common is listed once
_used: dict[str, int] = {}  # locks of the sources that this process uses, until it ends


def root() -> Path:
    return user_cache() / "drivetrain" / "stores"


def local_path(address: str) -> Path:
    """Returns where the copy of an address lies; a pattern's stands for its copies."""
    scheme, _, rest = address.partition("://")
    return root() / scheme / rest


def address_of(path: str) -> str | None:
    """Returns the address whose copy lies at a path; None for other paths."""
    try:
        scheme, *rest = Path(path).relative_to(root()).parts
    except ValueError:  # elsewhere, or the cache's folder itself
        return None
    return f"{scheme}://{'/'.join(rest)}" if rest and scheme != RECORDS else None


def shown_path(path: Path) -> str:
    """Returns a path as its user knows it: a copy by its address."""
    return address_of(str(path)) or str(path)


def bucket_of(address: str) -> str:
    """Returns the beginning of an address that names a bucket, a host or a repository."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{repository_of(rest) if scheme == 'hf' else rest.partition('/')[0]}"


def store_of(bucket: str) -> Store:
    return HubStore(bucket) if bucket.startswith("hf://") else ObjectStore(bucket)


def with_addresses(value: Any) -> Any:
    """Returns a JSON-able value with the paths of copies written as the addresses that they are copies of."""
    if isinstance(value, dict):
        return {key: with_addresses(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_addresses(each) for each in value]
    return (address_of(value) or value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Source:
    """The objects that an address stands for. names: of objects, or patterns of them: without braces, the address."""

    address: str
    names: Sequence[str]

    @property
    def bucket(self) -> str:
        return bucket_of(self.address)

    @property
    def keys(self) -> list[str]:
        return [name.removeprefix(self.bucket).strip("/") for name in self.names]

    @property
    def folder(self) -> str:
        """Returns the folder that all keys have in common, up to their first wildcards."""
        return os.path.commonpath([_fixed(key).rpartition("/")[0] for key in self.keys])

    @property
    def is_pattern(self) -> bool:
        return len(self.keys) > 1 or _fixed(self.keys[0]) != self.keys[0]

    @property
    def _record(self) -> Path:
        return root() / RECORDS / hashlib.sha256(self.address.encode()).hexdigest()[:40]

    def fetch(self, field: str, notify: Notify) -> Path:
        """Fetches what is missing or has changed, and keeps it in use until this process ends.

        Raises UserError if there is nothing, or it is more than the cache may hold; StoreError; OSError.
        """
        self._record.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._record}.fetching"):
            self._use()
            store = store_of(self.bucket)
            found = self.entries(store, field)
            if not found:
                raise problem(field, f"there is nothing at {self.address}", "correct the address")
            known = _read(self._record.with_suffix(".json")).get("files", {})
            needed = [each for each in found if known.get(each.path) != [each.bytes, each.tag] or not self._has(each)]
            self._make_room(field, found)
            files = {each.path: [each.bytes, each.tag] for each in found}
            self._unlink(known.keys() - files.keys())  # deleted in the store
            progress = _Progress(self.address, sum(each.bytes for each in needed), notify)
            for each in needed:
                download(store, each, local_path(self.bucket) / each.path, progress.add)
            write_whole(self._record.with_suffix(".json"), json.dumps({"address": self.address, "files": files}))
        return local_path(self.address)

    def entries(self, store: Store, field: str) -> list[Entry]:
        """Returns the objects, by the order of the names and then of the keys.

        Raises UserError with the names of braces that are missing, and StoreError.
        """
        found: dict[str, Entry] = {}
        missing: list[str] = []
        look_up = self._look_up(store)
        for key in self.keys:
            listed = look_up(key)
            found |= {each.path: each for each in listed if not each.path.endswith("/")}
            if not listed and _fixed(key) == key:
                missing.append(key)
        if missing and len(self.keys) > 1:
            shown = ", ".join(missing[:MOST_SHOWN]) + (" ..." if len(missing) > MOST_SHOWN else "")
            why = f"{len(missing)} of the {len(self.keys)} names of {self.address} are not there: {shown}"
            raise problem(field, why, "correct the braces")
        return list(found.values())

    def _look_up(self, store: Store) -> Callable[[str], list[Entry]]:
        """Returns what finds the objects of a key: those that it matches, the one of this name, or all below it."""
        has_lists = not self.bucket.startswith("http")
        if len(self.keys) <= MOST_LOOK_UPS or not has_lists:
            return lambda key: _single(store, key, has_lists)
        entries = sorted(store.entries(self.folder), key=lambda each: each.path)
        paths = [each.path for each in entries]

        def look_up(key: str) -> list[Entry]:
            if _fixed(key) != key:
                first, wanted = _fixed(key), re.compile(_regular(key))
                return [each for each in _from(entries, paths, first) if wanted.fullmatch(each.path)]
            same = next(iter(_from(entries, paths, key)), None)
            return [same] if same is not None and same.path == key else [*_from(entries, paths, f"{key}/")]

        return look_up

    def _has(self, entry: Entry) -> bool:
        with suppress(OSError):
            return (local_path(self.bucket) / entry.path).stat().st_size == entry.bytes
        return False

    def _use(self) -> None:
        """Takes a shared lock, which keeps the copies from being removed."""
        if self.address not in _used and fcntl is not None:
            _used[self.address] = os.open(self._record.with_suffix(".used"), os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(_used[self.address], fcntl.LOCK_SH)
        self._record.with_suffix(".used").touch()

    def _make_room(self, field: str, found: Sequence[Entry]) -> None:
        """Removes the sources that were used longest ago, so that these objects fit within the bound."""
        bound, wanted = bound_bytes(), sum(each.bytes for each in found)
        if wanted > bound:
            why = f"{self.address} has {wanted / 1e9:.2f} GB, and the cache may hold {bound / 1e9:g} GB"
            raise problem(field, why, f"set {BOUND} to more, or read it as a stream (workload.data.stream)")
        own = {local_path(self.bucket) / each.path: each.bytes for each in found}
        records = sorted((root() / RECORDS).glob("*.json"), key=lambda each: _time(each.with_suffix(".used")))
        others = {each: _sizes(each) for each in records if each != self._record.with_suffix(".json")}
        for each in list(others):
            held = {path: size for sizes in others.values() for path, size in sizes.items()} | own
            if sum(held.values()) <= bound:
                return
            if _remove(each):
                del others[each]

    def _unlink(self, paths: Iterable[str]) -> None:
        """Deletes copies, but none that another source holds too."""
        if gone := {local_path(self.bucket) / path for path in paths}:
            for file in gone - _held_beside(self._record.with_suffix(".json")):
                file.unlink(missing_ok=True)


class _Progress:
    """Reports how much of a source has come, at tenths of it."""

    def __init__(self, address: str, total: int, notify: Notify) -> None:
        self._address, self._total, self._notify, self._done, self._tenths = address, total, notify, 0, 0
        if total:
            notify(f"fetching {address} ({total / 1e6:,.1f} MB)")

    def add(self, count: int) -> None:
        self._done += count
        tenth = 10 * self._done // self._total
        if tenth > self._tenths and self._total > 2**28 and tenth < 10:
            self._tenths = tenth
            self._notify(f"fetching {self._address}: {tenth}0 % of {self._total / 1e6:,.1f} MB")


def bound_bytes() -> float:
    """Returns the cache's bound. Raises UserError for one that is no number."""
    given = os.environ.get(BOUND, "").strip()
    try:
        most = float(given) if given else USUAL_GB
    except ValueError:
        most = -1
    if not 0 <= most < float("inf"):
        raise problem(BOUND, f"{given!r} is no size", "give a number of GB, such as 50, or leave it out")
    return most * 1e9


def _remove(record: Path) -> bool:
    """Removes the copies of a source, unless a process uses it."""
    if fcntl is None:
        return False
    with record.with_suffix(".used").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        files = _sizes(record).keys() - _held_beside(record)
        record.unlink(missing_ok=True)
        for file in files:
            file.unlink(missing_ok=True)
    return True


def _sizes(record: Path) -> dict[Path, int]:
    """Returns the copies of a source and their sizes."""
    found = _read(record)
    if not found:
        return {}
    folder = local_path(bucket_of(found["address"]))
    return {folder / name: size for name, (size, _) in found["files"].items()}


def _held_beside(record: Path) -> set[Path]:
    """Returns the copies that sources of other records hold, which may be the same objects."""
    others = [each for each in record.parent.glob("*.json") if each != record]
    return {file for each in others for file in _sizes(each)}


def _read(record: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(record.read_text(encoding="utf-8")))
    return {}


def _time(file: Path) -> float:
    with suppress(OSError, ValueError):
        return file.stat().st_mtime
    return 0.0


def _single(store: Store, key: str, has_lists: bool) -> list[Entry]:
    """Asks the store for the objects of a key."""
    fixed = _fixed(key)
    if fixed != key:
        wanted = re.compile(_regular(key))
        return [each for each in store.entries(fixed.rpartition("/")[0]) if wanted.fullmatch(each.path)]
    single = store.entry(key) if key else None
    if single is not None:
        return [single]
    return store.entries(key) if has_lists else []


def _from(entries: Sequence[Entry], paths: Sequence[str], prefix: str) -> Iterator[Entry]:
    """Yields the objects whose paths, which are sorted, begin with a prefix."""
    for place in range(bisect_left(paths, prefix), len(paths)):
        if not paths[place].startswith(prefix):
            return
        yield entries[place]


def _fixed(key: str) -> str:
    """Returns a key up to its first wildcard."""
    return re.split(r"[*?\[]", key)[0]


def _regular(pattern: str) -> str:
    """Returns the regular expression of a pattern: * and ? stay within a name, ** does not."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]*\])", pattern)
    known = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(part, part.replace("[!", "[^") if part.startswith("[") and number % 2 else re.escape(part))
        for number, part in enumerate(parts)
    )
