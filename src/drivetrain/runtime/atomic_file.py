"""Replaces a text file as a whole: any reader, and any kill of the writer, leaves the old text or the new one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.errors import RunError, last_line

try:
    import fcntl
except ImportError:  # systems that are not POSIX
    fcntl = None  # type: ignore[assignment]

_CURES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, for the quota is used up",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
    errno.ENOENT: "put the folder back",
}


def followed(path: Path | str) -> Path:
    """Returns the path with ~ and links followed. A path that leads nowhere, such as a link to itself, is unchanged."""
    try:
        return Path(os.path.realpath(os.path.expanduser(path)))
    except ValueError:  # a text with a NUL character
        return Path(path)


def write_whole(path: Path, text: str) -> None:
    """Writes UTF-8, with line ends as they are. A link stays, and its target is replaced. Raises OSError."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a file beside `path` to write, which takes its place at the end; after an error nothing has changed."""
    target = followed(path)
    aside = target.with_name(f".{target.name}.partial-{os.getpid()}-{threading.get_ident()}")
    try:
        yield aside
        aside.replace(target)
    except BaseException:
        with suppress(OSError):  # a disk that is gone
            aside.unlink()
        raise


@contextmanager
def in_use(aside: Path) -> Iterator[None]:
    """Keeps other processes from removing a file of `replacing` that takes long to write: by a record lock, which ends
    with this process, and when this process closes the file anywhere. A file system without locks keeps all files."""
    descriptor = os.open(aside, os.O_RDWR)
    try:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path, names: str) -> None:
    """Removes what killed processes left of files that `replacing` was to replace, each written under `in_use`.

    names: a pattern of theirs, such as reference-*.npy.
    """
    own = f".partial-{os.getpid()}-"
    for aside in folder.glob(f".{names}.partial-*"):
        if fcntl is not None and own not in aside.name:
            with suppress(OSError), aside.open("rb+") as opened:
                fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                aside.unlink()


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(what: Path | str, then: str = "go on with --resume") -> Iterator[None]:
    """Turns an OSError of the block into a RunError that names the file, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        cure = _CURES.get(error.errno or 0, "look at the disk")
        raise RunError(f"{what} cannot be written: {last_line(error)}; {cure}, then {then}") from error
