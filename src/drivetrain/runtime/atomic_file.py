"""A text file that is there whole, or as it was before: whoever reads it, and whenever its writer is killed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.errors import RunError, last_line

_CURES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, for the quota is used up",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
    errno.ENOENT: "put the folder back",
}


def followed(path: Path | str) -> Path:
    """Where a path leads, ~ and links followed. One that leads nowhere, such as a link to itself, is as it was."""
    try:
        return Path(os.path.realpath(os.path.expanduser(path)))
    except ValueError:  # a text with a NUL character
        return Path(path)


def write_whole(path: Path, text: str) -> None:
    """UTF-8, line ends as they are. What a link points at is replaced, and the link stays. Raises OSError."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a file beside `path` to write, which takes its place at the end; after an error all is as it was."""
    target = followed(path)
    aside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        yield aside
        aside.replace(target)
    except BaseException:
        with suppress(OSError):  # a disk that is gone
            aside.unlink()
        raise


@contextmanager
def writing(what: Path | str, then: str = "go on with --resume") -> Iterator[None]:
    """Turns an OSError within into a RunError that names the file, the reason and what to do."""
    try:
        yield
    except OSError as error:
        cure = _CURES.get(error.errno or 0, "look at the disk")
        raise RunError(f"{what} cannot be written: {last_line(error)}; {cure}, then {then}") from error
