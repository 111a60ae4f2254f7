"""How memory is kept between steps: by the C library's malloc on a CPU run, by CUDA's allocator on a GPU.

By default glibc gives every block above 32 MB back to the kernel when it is freed; the next step gets fresh pages,
each zeroed on first touch. docs/background/speed.md says what it brings and what it costs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

import torch

_M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_KEEP = 2**31 - 1  # mallopt takes an int: the largest
SEGMENTS = "expandable_segments:True"
VARIABLE = "PYTORCH_ALLOC_CONF"
GIVEN = (VARIABLE, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # in any of which a user may have a say


def keep_freed_blocks() -> bool:
    """Ask glibc to reuse large blocks instead of returning them. False where there is no glibc (macOS, musl)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP // 2)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _KEEP))


def growing_segments() -> dict[str, str]:
    """Returns what the environment of a process needs so that CUDA's allocator maps memory into segments that grow.

    Segments of fixed sizes are left in pieces by tensors of ever other sizes, and memory runs out that is free. Nothing
    where the user has a say in it, and where torch has no such segments: without CUDA, under ROCm, on Windows.
    """
    has_them = torch.version.cuda is not None and sys.platform == "linux"
    return {VARIABLE: SEGMENTS} if has_them and not any(name in os.environ for name in GIVEN) else {}


def grow_segments() -> bool:
    """Has CUDA's allocator do so in this process, which may have started CUDA; before it has allocated anything. False
    where it already does, or must not."""
    if not growing_segments():
        return False
    torch._C._accelerator_setAllocatorSettings(SEGMENTS)
    return True
