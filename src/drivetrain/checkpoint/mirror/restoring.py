"""Opens a run's mirror: claims it, and brings what a machine lacks from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drivetrain.checkpoint.directory import newest_good, read_manifest
from drivetrain.checkpoint.mirror.index import Complete, Index, OwnIndex, read
from drivetrain.checkpoint.mirror.run_files import fetch_files
from drivetrain.checkpoint.mirror.transfer import fetch
from drivetrain.checkpoint.run_state import verify, verify_weights
from drivetrain.errors import RunError, last_line, problem
from drivetrain.runtime.object_store import ObjectStore, StoreError
from drivetrain.runtime.run_folder import RunFolder

Tell = Callable[[str], None]


def claimed(address: str, resume: bool, overwrite: bool, tell: Tell) -> tuple[ObjectStore, OwnIndex]:
    """Makes this process the writer of a mirror. Raises UserError if it is another's, or holds a run that is neither
    resumed nor overwritten; RunError if the store does not answer."""
    store = ObjectStore(address)
    own = OwnIndex(store, tell)
    try:
        index, _ = read(store)
        if index is not None and index.checkpoints and not (resume or overwrite):
            why = f"{store} already holds a run ({len(index.checkpoints)} checkpoints)"
            raise problem("mirror", why, "go on with --resume, replace it with --overwrite, or give another mirror")
        own.claim()
    except StoreError as error:
        fix = "look at the address, the credentials in the environment and the network"
        raise problem("mirror", str(error), fix) from None
    return store, own


def restore(store: ObjectStore, index: Index, folder: RunFolder, tell: Tell) -> None:
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
        newest = _first_good(store, newer, folder.checkpoints, tell)
        best = _best_of(index, newest)
        if best is not None and not (folder.checkpoints / f"step-{best.step:08d}").exists():
            _fetched(store, best, folder.checkpoints, tell)
    except (StoreError, OSError) as error:
        why = str(error) if isinstance(error, StoreError) else last_line(error)
        raise RunError(f"the run could not be brought from {store}: {why}; try again, or look at the store") from error
    if newer and newest is None and local is None:
        raise RunError(f"no checkpoint of {store} verifies: start anew with --overwrite")


def fetch_run(address: str, folder: Path, checkpoint: str, tell: Tell) -> None:
    """Copies a mirrored run and one of its checkpoints into a folder. checkpoint: best, last, or the name of one.

    Raises UserError if there is none, and StoreError.
    """
    store = ObjectStore(address)
    index, _ = read(store)
    if index is None:
        raise problem(address, "holds no run: it has no index.json", "give the address that a run was mirrored to")
    fetch_files(store, folder)
    root = RunFolder(folder).checkpoints
    wanted = [each for each in index.checkpoints if f"step-{each.step:08d}" == Path(checkpoint).name]
    if not wanted and checkpoint in ("best", "last"):
        newest = index.newest
        best = None if newest is None or checkpoint == "last" else _best_of(index, newest)
        wanted = [each for each in (best or newest,) if each is not None]
    for each in wanted:
        target = root / f"step-{each.step:08d}"
        if not target.is_dir() or verify_weights(target):
            _fetched(store, each, root, tell)


def _first_good(store: ObjectStore, newest_first: list[Complete], root: Path, tell: Tell) -> Complete | None:
    for each in newest_first:
        try:
            _fetched(store, each, root, tell)
        except StoreError as error:
            if error.passing:
                raise
            tell(f"checkpoint skipped: {error}")
            continue
        return each
    return None


def _fetched(store: ObjectStore, each: Complete, root: Path, tell: Tell) -> Path:
    tell(f"fetching step {each.step} of {store} ({each.bytes / 1e6:,.1f} MB)")
    return fetch(store, each, root, verify)


def _best_of(index: Index, newest: Complete | None) -> Complete | None:
    step = ((newest.facts if newest is not None else {}).get("best") or {}).get("step")
    return next((each for each in index.checkpoints if each.step == step), None)
