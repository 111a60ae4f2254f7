"""Folders that live as long as a launch: its temporary ones, and DeepSpeed's swap space on a disk.

Their owner deletes them. If it was killed, the next process that makes such a folder in the same place does. A folder
in use is never deleted, whatever process numbers, users or containers share the place: each process that uses a folder
keeps a file in it that names the machine and is locked (flock) as long as the process lives, and a folder goes only if
it holds such files, all of this machine and this user, and none of them is locked. A file system without locks keeps
them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # systems that are not POSIX
    fcntl = None  # type: ignore[assignment]

PREFIX = "drivetrain-"
_LOCKED, _NEW, _ENDED = ".owner-", ".new-", ".ended-"  # how names of the files begin that users keep in a folder


class Scratch:
    """A folder that this process uses. `with` closes it at the end."""

    def __init__(self, path: Path) -> None:
        """Joins the processes that use it already. Raises OSError."""
        self.path = path
        self._descriptor, name = tempfile.mkstemp(prefix=_NEW, dir=path)
        self._file = Path(name)
        os.write(self._descriptor, json.dumps(_machine() | {"process": os.getpid(), "since": _now()}).encode())
        with suppress(OSError):  # a file system without locks: the file proves nothing, and the folder stays
            _lock(self._descriptor)
            self._file = _renamed(self._file, _NEW, _LOCKED)  # only a locked one has the name that counts

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Deletes the folder, unless another living process uses it too: the last one does."""
        with suppress(OSError):
            _renamed(self._file, self._file.name[: self._file.name.index("-") + 1], _ENDED)
        with suppress(OSError):
            _unlock(self._descriptor)  # also for processes that were forked off and live
        os.close(self._descriptor)
        if any(True for _ in self.path.glob(f"{_LOCKED}*")):
            _delete_if_dead(self.path)
        else:
            with suppress(OSError):
                _delete(self.path, list(self.path.glob(f"{_ENDED}*")))


def make(parent: Path | None = None) -> Scratch:
    """Makes a new folder, in the system's temporary one if not in `parent`, after deleting those of dead launches.

    Raises OSError.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    delete_dead(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        return Scratch(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def join(path: Path) -> Scratch:
    """Joins the folder that another process made, or its counterpart on this machine's own disk. Raises OSError."""
    delete_dead(path.parent)
    path.mkdir(exist_ok=True)
    return Scratch(path)


def delete_dead(parent: Path) -> list[Path]:
    """Deletes the folders whose users are all dead, and returns them."""
    return [path for path in sorted(parent.glob(f"{PREFIX}*")) if _delete_if_dead(path)]


def _delete_if_dead(folder: Path) -> bool:
    with suppress(OSError), ExitStack() as locks:
        if folder.is_symlink() or folder.lstat().st_uid != _user():
            return False
        files = [file for begin in (_LOCKED, _ENDED, _NEW) for file in folder.glob(f"{begin}*")]
        if files and all(locks.enter_context(_dead(file)) for file in files):
            _delete(folder, files)
            return not folder.exists()
    return False


@contextmanager
def _dead(file: Path) -> Iterator[bool]:
    """Yields whether the user of a folder that keeps this file there is dead. While the block runs, this process locks
    the file.

    Raises OSError where the user lives, or where this cannot be found out.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        _lock(descriptor)
        is_same = os.path.samestat(os.fstat(descriptor), file.lstat())
        yield is_same and not file.name.startswith(_NEW) and _here(os.read(descriptor, 4096))
    finally:
        os.close(descriptor)


def _delete(folder: Path, files: list[Path]) -> None:
    """Deletes the users' files last: if something stays, or this process is killed, another one goes on."""
    for path in set(folder.iterdir()) - set(files):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if set(folder.iterdir()) <= set(files):
        for file in files:
            file.unlink(missing_ok=True)
        folder.rmdir()


def _lock(descriptor: int) -> None:
    """OSError where another process holds the lock, or where there are no locks."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no flock")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _user() -> int:
    """The number that files of this user have: 0 where the system numbers none."""
    return os.getuid() if hasattr(os, "getuid") else 0


def _renamed(file: Path, begin: str, other: str) -> Path:
    return file.rename(file.with_name(other + file.name.removeprefix(begin)))


def _here(signed: bytes) -> bool:
    """Returns whether it was signed on this machine: on a disk that several share, locks may end at each one's
    border."""
    try:
        there = json.loads(signed)
        return any(there[name] == value for name, value in _machine().items() if value)
    except (ValueError, KeyError, TypeError):
        return False


def _machine() -> dict[str, str]:
    """Identifies this machine. boot: the same in all its containers, whose host names differ."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
