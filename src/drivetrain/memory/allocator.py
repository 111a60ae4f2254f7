"""Keeps memory between steps: by the C library's malloc on a CPU run, by CUDA's allocator on a GPU.

By default glibc gives every block above 32 MB back to the kernel when it is freed; the next step gets fresh pages, each
zeroed on first touch. docs/background/speed.md has its gain and its cost.
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
    """Asks glibc to reuse large blocks instead of returning them. Returns False without glibc (macOS, musl)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP // 2)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _KEEP))


def growing_segments() -> dict[str, str]:
    """Returns the environment variables with which CUDA's allocator maps memory into segments that grow.

    Tensors of varying sizes fragment segments of fixed sizes, until an allocation fails although memory is free. Empty
    if the user has set it, or torch has no such segments: without CUDA, under ROCm, on Windows.
    """
    has_them = torch.version.cuda is not None and sys.platform == "linux"
    return {VARIABLE: SEGMENTS} if has_them and not any(name in os.environ for name in GIVEN) else {}


def grow_segments() -> bool:
    """Sets it in this process, which may have started CUDA, but not allocated anything. Returns False where it is set
    already, or must not be."""
    if not growing_segments():
        return False
    torch._C._accelerator_setAllocatorSettings(SEGMENTS)
    return True
