"""Memory that stays in use: what libraries keep, which Python's own counts do not see."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    """The fields that glibc's mallinfo2 returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def kept_bytes(work: Callable[[], object]) -> int:
    """Returns by how many bytes the blocks in use grow with some work."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("needs mallinfo2 of glibc 2.33")
    library.mallinfo2.restype = _MallInfo
    before = int(library.mallinfo2().uordblks)
    work()
    return int(library.mallinfo2().uordblks) - before
