"""The files of a run's folder beside its checkpoints: events, report, samples, records of trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from drivetrain.checkpoint.mirror.transfer import BELOW
from drivetrain.config.models_of_runs import LINKS
from drivetrain.runtime.downloads import download
from drivetrain.runtime.object_store import Entry, ObjectStore
from drivetrain.runtime.run_folder import RunFolder

NAMES = {path.name for path in RunFolder(Path()).results} - {*LINKS, BELOW}
RESULTS = ("run.yaml", "environment.json", "events.jsonl", "samples.jsonl", "report.json", "scores.npz")


class RunFiles:
    def __init__(self, store: ObjectStore, folder: RunFolder) -> None:
        self._store, self._folder = store, folder
        self._known: dict[str, tuple[int, int]] = {}  # what was uploaded: size and time of change

    def upload(self, check: Callable[[], None] = lambda: None) -> None:
        """Uploads the files that have changed since. Raises StoreError. check: called before each one."""
        for file in files_of(self._folder.path):
            check()
            try:
                state = file.stat()
            except FileNotFoundError:  # a tracker's, which replaces its own
                continue
            name, now = file.relative_to(self._folder.path).as_posix(), (state.st_size, state.st_mtime_ns)
            if self._known.get(name) != now:
                self._store.upload(name, file)
                self._known[name] = now


def files_of(folder: Path) -> Iterator[Path]:
    """Yields the files that are mirrored: the run's own ones, but none that is hidden, a link, or part of a
    checkpoint."""
    for path in sorted(folder.iterdir()):
        if path.name not in NAMES or path.is_symlink():
            continue
        if path.is_dir():
            yield from (each for each in sorted(path.rglob("*")) if each.is_file() and not each.name.startswith("."))
        elif path.is_file():
            yield path


def entries_of(store: ObjectStore) -> list[Entry]:
    """Lists the files of a mirrored run beside its checkpoints; other runs and data below its address are not its own.
    Raises StoreError."""
    return [entry for entry in store.entries() if entry.path.partition("/")[0] in NAMES]


def fetch_files(store: ObjectStore, folder: Path, records: bool = True) -> None:
    """Downloads the files of a mirrored run beside its checkpoints. Raises StoreError and OSError.

    records: also those in folders and of trackers, without which a run can be loaded and reported.
    """
    for entry in entries_of(store):
        if records or entry.path in RESULTS:
            download(store, entry, folder / entry.path)
