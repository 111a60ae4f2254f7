"""Maps arrays from files, and unmaps the pages of them that were read, so that memory does not grow with the data.

A page of a mapped file that a process has touched counts as its memory until the system needs the room: a pass over
arrays of 10 GB would be seen as 10 GB, and job schedulers that bound resident memory would end it. Released pages stay
in the system's cache, from which they come back in less than a microsecond.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from pathlib import Path

import numpy as np

MOST = 128 << 20  # bytes of files that a process keeps mapped beyond those after its last release

_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    """Maps an array from its file, read-only: its pages are in memory once a machine, and only while there is room."""
    if not file.stat().st_size:
        return np.zeros(0, dtype)
    with file.open("rb") as opened:
        found = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    _maps.add(found)
    return np.frombuffer(found, dtype)


class ReadPages:
    """Pages of mapped arrays that this process has read."""

    def __init__(self) -> None:
        self._process = self._statm = self._least = 0

    def release(self) -> None:
        """Unmaps them where they have become many. To be called for each batch: one access to a large file may map two
        megabytes around it."""
        if not _maps or sys.platform != "linux":
            return
        if self._process != os.getpid():  # a forked loader worker begins with its parent's figures
            self._process, self._statm = os.getpid(), os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            self._least = self._bytes_of_files()
        if self._bytes_of_files() - self._least > MOST:
            for each in _maps:
                each.madvise(mmap.MADV_DONTNEED)
            self._least = self._bytes_of_files()

    def _bytes_of_files(self) -> int:
        """Returns the resident bytes of this process that files back."""
        return int(os.pread(self._statm, 128, 0).split()[2]) * mmap.PAGESIZE


READ_PAGES = ReadPages()
