"""Writes a folder that is complete or absent: aside, flushed to the disk, then renamed into its place."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain.errors import problem
from drivetrain.runtime.atomic_file import followed, sync


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yields an empty folder beside `output`, which takes its place at the end; after an error nothing is left of it.

    output: new or empty. What a killed process of this machine left half-written beside it is removed first. Raises
    UserError if something is there, OSError if nothing can be written.
    """
    refuse_taken(output)
    output = followed(output)  # an empty folder behind a link is replaced itself
    _clear_dead(output)
    aside = output.with_name(f"{_beginning(output)}{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        for path in (*aside.rglob("*"), aside):
            sync(path)
        if output.exists():
            output.rmdir()
        aside.rename(output)
        sync(output.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # there only if something failed


def refuse_taken(output: Path) -> None:
    """Raises UserError if there is anything at `output` but an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise problem("--output", f"{output} is there already", "give a folder that is new or empty")


def _beginning(output: Path) -> str:
    """Returns the beginning of a hidden name; the machine's is in it, because process numbers are of one machine."""
    machine = re.sub(r"\W", "-", platform.node()) or "machine"
    return f".{output.name}.partial-{machine}-"


def _clear_dead(output: Path) -> None:
    beginning = _beginning(output)
    for path in list(output.parent.iterdir()) if output.parent.is_dir() else ():
        number = path.name.removeprefix(beginning)
        if path.name.startswith(beginning) and number.isdigit() and not _lives(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return process != os.getpid()  # this one's number, of a process before it
