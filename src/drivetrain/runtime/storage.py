"""The verbs by which the folder of a run and its checkpoints are written, read, listed, published and deleted.

Nothing else writes, renames or deletes there (tests/runtime/test_storage.py), but lock.py, which keeps the folder for
one run, and atomic_file.py, by whose functions a whole file is replaced. Each verb here is what one on another kind of
storage would have to keep, whatever kills the process:

    replaced, rewrite       a reader finds the old file or the new one
    append                  adds all of its bytes or none
    begin, put, reserve, fill, then publish
                            a folder is written aside, by many ranks at once, and is complete or absent; what a
                            workload puts beside the weights is written into it too
    delete                  a folder is whole or absent
    link_all                a second name of each file, which keeps its contents when the first one goes
    entries, local_file     list and read; local_file gives a path, since libraries map files into memory
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.runtime.atomic_file import replacing, sync

LARGEST_WRITE = 2**30  # bytes; Linux takes at most 2 GiB at once

# --- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(file: Path, text: str) -> Iterator[None]:
    """Writes UTF-8 beside a file before the block, and puts it into the file's place after it, unless it fails."""
    with replacing(file) as aside:
        aside.write_text(text, encoding="utf-8")
        yield


def rewrite(file: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file by these parts, which may be read from it."""
    with replacing(file) as aside, aside.open("wb") as opened:
        for part in parts:
            opened.write(part)


def append(file: Path, data: bytes) -> None:
    """Appends all of the bytes or none. Raises OSError."""
    with file.open("ab", buffering=0) as opened:
        end = opened.tell()
        try:
            if opened.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            opened.truncate(end)
            raise


def end_line(file: Path) -> None:
    """Ends a line that a kill cut off, if there is such a file; otherwise the next one would continue it."""
    if not file.exists():
        return
    with file.open("r+b", buffering=0) as opened:
        if opened.seek(0, os.SEEK_END) and os.pread(opened.fileno(), 1, opened.tell() - 1) != b"\n":
            opened.write(b"\n")


def local_file(folder: Path, name: str) -> Path:
    """Returns the path of a file in the folder. Raises OSError if it is missing, a folder, a device, or a link out of
    it."""
    try:
        file = (folder / name).resolve(strict=True)
    except RuntimeError as error:  # of links that lead in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
    if not file.is_relative_to(folder.resolve()):
        raise OSError(errno.EPERM, "it is a link that leads out of the checkpoint")
    if not file.is_file():
        raise OSError(errno.EPERM, "it is no file")
    return file


# --- a folder written aside ------------------------------------------------------------------------------------------


def begin(aside: Path) -> None:
    """Makes an empty folder under a hidden name."""
    discard(aside)
    aside.mkdir()


def put(file: Path, text: str) -> None:
    """Writes a file, UTF-8, in a folder that was begun or made."""
    file.write_text(text, encoding="utf-8")


def reserve(file: Path, beginning: bytes, size: int) -> None:
    """Makes a file of `size` bytes, and writes its beginning. Raises OSError if the disk has no room."""
    with file.open("xb") as opened:
        _write(opened.fileno(), memoryview(beginning), 0)
        try:
            _allocate(opened.fileno(), size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # not every file system has it
                raise
            os.truncate(opened.fileno(), size)


def _allocate(descriptor: int, size: int) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS
        raise OSError(errno.ENOSYS, "this system cannot reserve room for a file")
    os.posix_fallocate(descriptor, 0, size)


def fill(file: Path, runs: Iterable[tuple[int, memoryview]]) -> None:
    """Writes runs of bytes at their places in a reserved file, and syncs them to the disk. Other ranks write others."""
    with file.open("r+b") as opened:
        for place, run in runs:
            _write(opened.fileno(), run, place)
        os.fsync(opened.fileno())


def _write(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        done = os.pwrite(descriptor, data[:LARGEST_WRITE], place)
        data, place = data[done:], place + done


def publish(aside: Path, target: Path, earlier: Path) -> None:
    """Gives a folder that was synced its name. One that has the name already waits under the name `earlier` until the
    new one's is on the disk, or comes back after an error."""
    if not target.exists():
        aside.rename(target)
        sync(target.parent)
        return
    target.rename(earlier)
    try:
        aside.rename(target)
    except OSError:
        earlier.rename(target)
        raise
    sync(target.parent)  # the new one is durable before the old one goes
    discard(earlier)


# --- folders and what lies in them -----------------------------------------------------------------------------------


def entries(folder: Path) -> list[Path]:
    """Returns what lies in a folder, by name; nothing where there is no folder."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def make(folder: Path) -> None:
    """Makes a folder and those above it, where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)


def free_bytes(folder: Path) -> int:
    """Returns the room that is left where a folder lies. Raises OSError if there is no such folder."""
    return shutil.disk_usage(folder).free


def check_writable(folder: Path) -> None:
    """Makes a folder, if it is missing, and a file in it, which is taken away again. Raises OSError."""
    trial = folder / f".writable-{os.getpid()}"
    make(folder)
    trial.write_text("")
    trial.unlink()


def move(path: Path, target: Path) -> None:
    """Gives a file or folder another name, in a folder that is made if it is missing."""
    target.parent.mkdir(exist_ok=True)
    path.rename(target)


def link_all(folder: Path, target: Path) -> None:
    """Makes a folder whose files are hard links to those of another. Raises OSError where the file system has none."""
    begin_below(target)
    for path in sorted(folder.rglob("*")):
        place = target / path.relative_to(folder)
        if path.is_dir():
            place.mkdir()
        else:
            os.link(path, place)


def begin_below(folder: Path) -> None:
    """Makes an empty folder, and those above it."""
    discard(folder)
    folder.mkdir(parents=True)


def delete(folder: Path, aside: Path) -> None:
    """Deletes a folder. Raises OSError if it stays as it is. What cannot go yet (a file still open, over NFS) lies
    under the hidden name `aside`."""
    discard(aside)
    folder.rename(aside)  # a kill in the middle of deleting leaves nothing that looks whole
    discard(aside)


def discard(folder: Path) -> None:
    """Removes what is left of a folder that no reader takes for a whole one, as far as it can be."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_empty(folder: Path) -> None:
    """Removes a folder, if there is one. Raises OSError if something lies in it."""
    if folder.is_dir():
        folder.rmdir()


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def point(link: Path, target: Path | None) -> None:
    """Makes a link lead to a folder, or takes it away, at once. Does nothing where the file system has no links, or
    where something else has the link's name."""
    aside = link.with_name(f".{link.name}-{os.getpid()}")
    with suppress(OSError):
        if os.path.lexists(link) and not link.is_symlink():
            return
        if target is None:
            link.unlink(missing_ok=True)
            return
        aside.unlink(missing_ok=True)
        aside.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
        aside.replace(link)
