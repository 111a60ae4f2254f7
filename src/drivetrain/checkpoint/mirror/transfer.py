"""Checkpoints on their way to a store and back, each file proved by the checksums of its manifest.

A checkpoint goes under a prefix that no other one has: its files first, each read back and compared, and its manifest
last, by a put that holds only where there is none. A file is uploaded in parts that are read from the disk as they are
sent, and read back in ranges: no file is ever in memory as a whole.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drivetrain.checkpoint.directory import BLOCK, MANIFEST, FileRecord, hidden, read_manifest
from drivetrain.checkpoint.mirror.index import Complete
from drivetrain.runtime import storage
from drivetrain.runtime.atomic_file import sync
from drivetrain.runtime.downloads import download
from drivetrain.runtime.object_store import PARALLEL, PART, ObjectStore, StoreError

BELOW = "checkpoints"
ATTEMPTS = 3  # of a file that comes back different
OLD = 24 * 3600.0  # seconds, after which what no index names was left by a killed upload
Moved = Callable[[int], None]


def upload(store: ObjectStore, folder: Path, step: int, token: str, moved: Moved = lambda _: None) -> Complete:
    """Uploads a checkpoint's folder and returns its entry for the index. Raises StoreError, or OSError if the folder is
    gone or damaged. moved: called with the bytes that went either way."""
    text = (folder / MANIFEST).read_bytes()
    manifest = read_manifest(folder)
    prefix = f"step-{step:08d}-{token}-{secrets.token_hex(4)}"
    for name, record in manifest.files.items():
        _upload_proved(store, folder / name, f"{BELOW}/{prefix}/{name}", record, moved)
    store.put_if(f"{BELOW}/{prefix}/{MANIFEST}", text, None)
    size = len(text) + sum(record.bytes for record in manifest.files.values())
    digest = hashlib.sha256(text).hexdigest()
    return Complete(step=step, prefix=prefix, bytes=size, facts=manifest.facts, manifest=digest)


def _upload_proved(store: ObjectStore, file: Path, path: str, record: FileRecord, moved: Moved) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        store.upload(path, file, moved)
        entry = store.entry(path)
        if entry is not None and entry.bytes == record.bytes and sums(store, path, record, moved) == record.sha256:
            return
        if attempt == ATTEMPTS:
            raise StoreError(f"{store}/{path} reads back different from what was uploaded, {ATTEMPTS} times")


def sums(store: ObjectStore, path: str, record: FileRecord, moved: Moved) -> list[str]:
    """Returns the SHA-256 of each block of an object, as a manifest has them."""

    def of_block(start: int) -> str:
        digest, stop = hashlib.sha256(), min(start + BLOCK, record.bytes)
        for place in range(start, stop, PART):
            part = store.read_range(path, place, min(place + PART, stop))
            digest.update(part)
            moved(len(part))
        return digest.hexdigest()

    with ThreadPoolExecutor(PARALLEL, "mirror-proof") as pool:
        return list(pool.map(of_block, range(0, max(record.bytes, 1), BLOCK)))


def fetch(store: ObjectStore, entry: Complete, root: Path, wrong_with: Callable[[Path], list[str]]) -> None:
    """Downloads a complete checkpoint into a folder of checkpoints.

    It is published once it verifies. Raises StoreError if it does not, and OSError for a disk that is full.
    """
    target = root / f"step-{entry.step:08d}"
    aside = hidden(target, "partial")
    prefix = f"{BELOW}/{entry.prefix}/"
    found = store.entries(f"{BELOW}/{entry.prefix}")
    storage.make(root)
    if sum(each.bytes for each in found) > storage.free_bytes(root):
        raise OSError(f"no space left in {root} for {sum(each.bytes for each in found):,} bytes")
    storage.begin(aside)
    try:
        for each in found:
            download(store, each, aside / each.path.removeprefix(prefix))
        if wrong := wrong_with(aside):
            raise StoreError(f"{store}/{prefix.rstrip('/')} is damaged: {'; '.join(wrong)}", passing=False)
        for path in sorted(aside.rglob("*")):
            sync(path)
        storage.publish(aside, target, hidden(target, "replaced"))
    finally:
        storage.discard(aside)


def remove(store: ObjectStore, prefixes: set[str]) -> None:
    """Deletes checkpoints that the index no longer names: the manifest first, so that none looks whole."""
    for prefix in sorted(prefixes):
        paths = [each.path for each in store.entries(f"{BELOW}/{prefix}")]
        store.delete(sorted(paths, key=lambda path: not path.endswith(f"/{MANIFEST}")))


def orphans(store: ObjectStore, named: set[str], dead: set[str]) -> set[str]:
    """Returns prefixes of checkpoints that no index names: those of dead writers, and those whose objects are all old.

    dead: tokens of writers that have ended. Others may still be uploading, if only to be refused.
    """
    newest: dict[str, float] = {}
    for each in store.entries(BELOW):
        prefix = each.path.removeprefix(f"{BELOW}/").partition("/")[0]
        if token_of(prefix):  # what has another name is not a run's
            newest[prefix] = max(newest.get(prefix, 0.0), each.modified)
    left = {prefix: modified for prefix, modified in newest.items() if prefix not in named}
    return {prefix for prefix, modified in left.items() if token_of(prefix) in dead or time.time() - modified > OLD}


def overwritten(store: ObjectStore) -> set[str]:
    """Returns the prefixes of all checkpoints below a run's address."""
    found = {each.path.removeprefix(f"{BELOW}/").partition("/")[0] for each in store.entries(BELOW)}
    return {prefix for prefix in found if token_of(prefix)}


def token_of(prefix: str) -> str:
    """Returns the token of the writer of step-<number>-<token>-<random>."""
    parts = prefix.split("-")
    return parts[2] if len(parts) == 4 and parts[0] == "step" else ""
