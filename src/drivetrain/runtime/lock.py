"""Lets one run at a time use a folder, and one process write a file, by a lock that the kernel releases when its holder
dies in any way.

A POSIX record lock and not flock: loader processes that were forked off would keep a flock for their parent, and NFS
carries record locks from one machine to the other.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from drivetrain.errors import UserError, problem

try:
    import fcntl
except ImportError:  # systems that are not POSIX
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def held(folder: Path) -> Iterator[str | None]:
    """While the block runs, the folder is this process's. Raises UserError that names the process that holds it.

    Yields a warning where the file system has no locks, so that nothing keeps a second run out.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, notice = _locked(folder / LOCK, lambda who: _taken(folder, who))
    except OSError as error:
        fix = "give another folder as output"
        raise problem("output", f"{folder} cannot be written: {error.strerror}", fix) from None
    try:
        yield notice
    finally:
        with suppress(OSError):  # the folder may be gone, or its disk
            if notice is None and _is(descriptor, folder / LOCK):  # not another run's, in a folder of this name
                (folder / LOCK).unlink()
            if is_new:
                folder.rmdir()  # if nothing came into it
        os.close(descriptor)


@contextmanager
def holding(path: Path, taken: Callable[[str | None], UserError]) -> Iterator[None]:
    """While the block runs, the lock file at `path` is this process's; then it is gone. Where the system or the file
    system has no locks, nothing keeps others out.

    taken: returns the error to raise where another process holds it, from the holder's description, such as "process 7
    on host, since ..."; None where it is not known. Raises OSError where the file cannot be made.
    """
    descriptor, _ = _locked(path, taken)
    try:
        yield
    finally:
        with suppress(OSError):
            if _is(descriptor, path):
                path.unlink()
        os.close(descriptor)


def refuse_if_held(folder: Path) -> None:
    """Raises UserError if a run works there. Not for its own process, which would lose its lock by checking it."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        with suppress(OSError):
            _lock(descriptor, folder / LOCK, lambda who: _taken(folder, who))
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Returns whether a run works there. It takes no lock, unlike `refuse_if_held`, so that it may look again and
    again without ever being in a starting run's way; where the system cannot say so, False."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        if fcntl is None or sys.platform != "linux":
            return False
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of 64-bit Linux
        kind: int = struct.unpack("hhqqi", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK
    except (OSError, struct.error):
        return False
    finally:
        os.close(descriptor)


def _locked(path: Path, taken: Callable[[str | None], UserError]) -> tuple[int, str | None]:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            notice = _lock(descriptor, path, taken)
            if notice is not None or _is(descriptor, path):
                _sign(descriptor)
                return descriptor, notice
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder took the file away between our opening and our lock


def _lock(descriptor: int, path: Path, taken: Callable[[str | None], UserError]) -> str | None:
    if fcntl is None:
        return f"this system has no POSIX locks: nothing keeps a second run out of {path.parent}"
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise taken(_holder(path)) from None
        if error.errno not in _NO_LOCKS:
            raise
        return f"the file system of {path.parent} has no locks: nothing keeps a second run out of this folder"
    return None


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": since})
    with suppress(OSError):  # a full disk: the lock holds without a name, and what needs the room says so
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _holder(path: Path) -> str | None:
    """Returns the process that signed a lock; None where it has not signed yet."""
    try:
        by = json.loads(path.read_text())
        return f"process {by['process']} on {by['host']}, since {by['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _taken(folder: Path, who: str | None) -> UserError:
    fix = "wait for it or end it (SIGTERM saves first), or give another output or name"
    return problem("output", f"a run is working in {folder}: {who or 'another process'}", fix)
