"""The C library's malloc on a CPU run: keep freed blocks, so that the next step does not fault them in again.

By default glibc gives every block above 32 MB back to the kernel when it is freed; the next step gets fresh pages,
each zeroed on first touch. docs/speed.md says what it brings and what it costs.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_KEEP = 2**31 - 1  # mallopt takes an int: the largest


def keep_freed_blocks() -> bool:
    """Ask glibc to reuse large blocks instead of returning them. False where there is no glibc (macOS, musl)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP // 2)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _KEEP))
