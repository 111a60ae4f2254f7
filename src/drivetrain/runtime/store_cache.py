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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from drivetrain.errors import problem
from drivetrain.runtime.atomic_file import write_whole
from drivetrain.runtime.downloads import Store, download
from drivetrain.runtime.hub_store import HubStore, repository_of
from drivetrain.runtime.object_store import Entry, ObjectStore
from drivetrain.runtime.user_cache import user_cache

try:
    import fcntl
except ImportError:  # systems that are not POSIX
    fcntl = None  # type: ignore[assignment]

BOUND = "DRIVETRAIN_STORE_CACHE_GB"
USUAL_GB = 100.0
RECORDS = ".sources"
MARKS = "*?["
Tell = Callable[[str], None]
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
    def _record(self) -> Path:
        return root() / RECORDS / hashlib.sha256(self.address.encode()).hexdigest()[:40]

    def fetch(self, field: str, tell: Tell) -> Path:
        """Fetches what is missing or has changed, and keeps it in use until this process ends.

        Raises UserError if there is nothing, or it is more than the cache may hold; StoreError; OSError.
        """
        self._record.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._record}.fetching"):
            self._use()
            store = store_of(self.bucket)
            found = self.entries(store)
            if not found:
                raise problem(field, f"there is nothing at {self.address}", "correct the address")
            known = _read(self._record.with_suffix(".json")).get("files", {})
            needed = [each for each in found if known.get(each.path) != [each.bytes, each.tag] or not self._has(each)]
            self._make_room(field, sum(each.bytes for each in found))
            files = {each.path: [each.bytes, each.tag] for each in found}
            for path in known.keys() - files.keys():  # deleted in the store
                (local_path(self.bucket) / path).unlink(missing_ok=True)
            progress = _Progress(self.address, sum(each.bytes for each in needed), tell)
            for each in needed:
                download(store, each, local_path(self.bucket) / each.path, progress.add)
            write_whole(self._record.with_suffix(".json"), json.dumps({"address": self.address, "files": files}))
        return local_path(self.address)

    def entries(self, store: Store) -> list[Entry]:
        """Returns the objects, by the order of the names and then of the keys."""
        found: dict[str, Entry] = {}
        for key in self.keys:
            fixed = re.split(r"[*?\[]", key)[0]
            if fixed != key:
                wanted = re.compile(_regular(key))
                listed = [each for each in store.entries(fixed.rpartition("/")[0]) if wanted.fullmatch(each.path)]
            else:
                single = store.entry(key) if key else None
                listed = [single] if single is not None else [] if _has_no_lists(self.bucket) else store.entries(key)
            found |= {each.path: each for each in listed if not each.path.endswith("/")}
        return list(found.values())

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

    def _make_room(self, field: str, wanted: int) -> None:
        """Removes the sources that were used longest ago, so that one of so many bytes fits within the bound."""
        bound = bound_bytes()
        if wanted > bound:
            why = f"{self.address} has {wanted / 1e9:.2f} GB, and the cache may hold {bound / 1e9:g} GB"
            raise problem(field, why, f"set {BOUND} to more, or read it as a stream (workload.data.stream)")
        records = sorted((root() / RECORDS).glob("*.json"), key=lambda each: _time(each.with_suffix(".used")))
        sizes = {each: sum(size for size, _ in _read(each).get("files", {}).values()) for each in records}
        own = self._record.with_suffix(".json")
        excess = sum(size for each, size in sizes.items() if each != own) + wanted - bound
        for each in records:
            if excess > 0 and each != own and _remove(each):
                excess -= sizes[each]


class _Progress:
    """Tells how much of a source has come, at tenths of it."""

    def __init__(self, address: str, total: int, tell: Tell) -> None:
        self._address, self._total, self._tell, self._done, self._told = address, total, tell, 0, 0
        if total:
            tell(f"fetching {address} ({total / 1e6:,.1f} MB)")

    def add(self, count: int) -> None:
        self._done += count
        tenth = 10 * self._done // self._total
        if tenth > self._told and self._total > 2**28 and tenth < 10:
            self._told = tenth
            self._tell(f"fetching {self._address}: {tenth}0 % of {self._total / 1e6:,.1f} MB")


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
        found = _read(record)
        record.unlink(missing_ok=True)
        for name in found.get("files", {}):
            (local_path(bucket_of(found["address"])) / name).unlink(missing_ok=True)
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    with suppress(OSError, ValueError):
        yield


def _read(record: Path) -> dict[str, Any]:
    with _quiet():
        return dict(json.loads(record.read_text(encoding="utf-8")))
    return {}


def _time(file: Path) -> float:
    with _quiet():
        return file.stat().st_mtime
    return 0.0


def _has_no_lists(bucket: str) -> bool:
    return bucket.startswith("http")


def _regular(pattern: str) -> str:
    """Returns the regular expression of a pattern: * and ? stay within a name, ** does not."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]*\])", pattern)
    known = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(part, part.replace("[!", "[^") if part.startswith("[") and number % 2 else re.escape(part))
        for number, part in enumerate(parts)
    )
