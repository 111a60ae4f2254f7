"""The files of a run's folder beside its checkpoints: events, report, samples, records of trackers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drivetrain.checkpoint.mirror.index import NAME
from drivetrain.checkpoint.mirror.transfer import BELOW
from drivetrain.runtime.downloads import download
from drivetrain.runtime.object_store import ObjectStore
from drivetrain.runtime.run_folder import LINKS, RunFolder


class RunFiles:
    def __init__(self, store: ObjectStore, folder: RunFolder) -> None:
        self._store, self._folder = store, folder
        self._known: dict[str, tuple[int, int]] = {}  # what was uploaded: size and time of change

    def upload(self) -> None:
        """Uploads the files that have changed since. Raises StoreError."""
        for file in files_of(self._folder.path):
            try:
                state = file.stat()
            except FileNotFoundError:  # a tracker's, which replaces its own
                continue
            name, now = file.relative_to(self._folder.path).as_posix(), (state.st_size, state.st_mtime_ns)
            if self._known.get(name) != now:
                self._store.upload(name, file)
                self._known[name] = now


def files_of(folder: Path) -> Iterator[Path]:
    """Yields the files that are mirrored: none that is hidden, a link, or part of a checkpoint."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in (*LINKS, BELOW, NAME) or path.is_symlink():
            continue
        if path.is_dir():
            yield from (each for each in sorted(path.rglob("*")) if each.is_file() and not each.name.startswith("."))
        elif path.is_file():
            yield path


def fetch_files(store: ObjectStore, folder: Path) -> None:
    """Downloads the files of a mirrored run beside its checkpoints. Raises StoreError and OSError."""
    for entry in store.entries():
        if entry.path != NAME and not entry.path.startswith(f"{BELOW}/"):
            download(store, entry, folder / entry.path)
