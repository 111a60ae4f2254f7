"""Opens a run's mirror: claims it, and brings what a machine lacks from there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from drivetrain.checkpoint.directory import MANIFEST, newest_good, read_manifest, steps
from drivetrain.checkpoint.mirror.index import Complete, Index, OwnIndex, read
from drivetrain.checkpoint.mirror.run_files import entries_of, fetch_files, files_of
from drivetrain.checkpoint.mirror.transfer import fetch
from drivetrain.checkpoint.run_state import verify, verify_weights
from drivetrain.errors import RunError, last_line, problem
from drivetrain.runtime import storage
from drivetrain.runtime.notices import Notify
from drivetrain.runtime.object_store import ObjectStore, StoreError
from drivetrain.runtime.run_folder import RunFolder

BEFORE = "before-"


def claimed(address: str, resume: bool, overwrite: bool, notify: Notify) -> tuple[ObjectStore, OwnIndex]:
    """Makes this process the writer of a mirror. Raises UserError if it is another's, holds
    a run that is neither resumed nor overwritten, or objects of no run, or if the store does not answer."""
    store = ObjectStore(address)
    own = OwnIndex(store, notify)
    try:
        index, _ = read(store)
        if index is not None and index.checkpoints and not (resume or overwrite):
            why = f"{store} already holds a run ({len(index.checkpoints)} checkpoints)"
            raise problem("mirror", why, "go on with --resume, replace it with --overwrite, or give another mirror")
        if index is None and not store.is_empty():
            why = f"{store} has no index.json, so it is no run, and yet objects lie there"
            raise problem("mirror", why, "give an address below which nothing lies, or empty this one yourself")
        own.claim()
    except StoreError as error:
        fix = "look at the address, the credentials in the environment and the network"
        raise problem("mirror", str(error), fix) from None
    return store, own


def restore(store: ObjectStore, index: Index, folder: RunFolder, notify: Notify) -> None:
    """Brings the newest checkpoint, the best one and the run's files, where the folder has nothing as new.

    Raises RunError if no checkpoint of the mirror can be fetched although it names some.
    """
    local, _ = newest_good(folder.checkpoints, verify)
    have = -1 if local is None else read_manifest(local).step
    newer = sorted((each for each in index.checkpoints if each.step > have), key=lambda each: -each.step)
    if not newer and (folder.run_file.is_file() or not index.checkpoints):
        return
    try:
        fetch_files(store, folder.path)
        newest = _first_good(store, newer, folder.checkpoints, notify)
        best = _best_of(index, newest)
        if best is not None and not (folder.checkpoints / f"step-{best.step:08d}").exists():
            _first_good(store, [best], folder.checkpoints, notify)  # the run goes on without a damaged one
    except (StoreError, OSError) as error:
        why = str(error) if isinstance(error, StoreError) else last_line(error)
        raise RunError(f"the run could not be brought from {store}: {why}; try again, or look at the store") from error
    if newer and newest is None and local is None:
        raise RunError(f"no checkpoint of {store} verifies: start anew with --overwrite")


def fetch_run(address: str, folder: Path, checkpoints: Sequence[str], notify: Notify) -> None:
    """Copies the results of a mirrored run and some of its checkpoints into a folder of the cache, and removes there
    what the run no longer has. checkpoints: best, last, all, before-STEP (the newest one before it), or names.

    Raises UserError if there is no run, and StoreError.
    """
    store = ObjectStore(address)
    index, _ = read(store)
    if index is None:
        raise problem(address, "holds no run: it has no index.json", "give the address that a run was mirrored to")
    storage.make(folder)
    there = {entry.path for entry in entries_of(store)}
    for file in [each for each in files_of(folder) if each.relative_to(folder).as_posix() not in there]:
        file.unlink(missing_ok=True)
    fetch_files(store, folder, records=False)
    root = RunFolder(folder).checkpoints
    named = {each.step: each.manifest for each in index.checkpoints}
    for path in steps(root):
        if _digest(path) not in named.values():  # of an overwritten run, or one that retention has removed
            storage.discard(path)
    for each in _wanted(index, checkpoints):
        target = root / f"step-{each.step:08d}"
        if _digest(target) != each.manifest or verify_weights(target):
            _fetched(store, each, root, notify)


def _wanted(index: Index, checkpoints: Sequence[str]) -> list[Complete]:
    if "all" in checkpoints:
        return [*index.checkpoints]
    found = [each for name in checkpoints if (each := _named(index, name)) is not None]
    return list({each.step: each for each in found}.values())


def _named(index: Index, checkpoint: str) -> Complete | None:
    """Returns the checkpoint that is best, the last one, the last before a step, or of this name; None for none."""
    if checkpoint == "last":
        return index.newest
    if checkpoint == "best":
        return _best_of(index, index.newest) or index.newest
    if (step := checkpoint.removeprefix(BEFORE)) != checkpoint and step.isdecimal():
        earlier = [each for each in index.checkpoints if each.step < int(step)]
        return max(earlier, key=lambda each: each.step, default=None)
    return next((each for each in index.checkpoints if f"step-{each.step:08d}" == Path(checkpoint).name), None)


def _digest(checkpoint: Path) -> str:
    """Returns the digest of a checkpoint's manifest; empty where there is none."""
    with suppress(OSError):
        return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    return ""


def _first_good(store: ObjectStore, newest_first: list[Complete], root: Path, notify: Notify) -> Complete | None:
    for each in newest_first:
        try:
            _fetched(store, each, root, notify)
        except StoreError as error:
            if error.passing:
                raise
            notify(f"checkpoint skipped: {error}")
            continue
        return each
    return None


def _fetched(store: ObjectStore, each: Complete, root: Path, notify: Notify) -> None:
    notify(f"fetching step {each.step} of {store} ({each.bytes / 1e6:,.1f} MB)")
    fetch(store, each, root, verify)


def _best_of(index: Index, newest: Complete | None) -> Complete | None:
    step = ((newest.facts if newest is not None else {}).get("best") or {}).get("step")
    return next((each for each in index.checkpoints if each.step == step), None)
