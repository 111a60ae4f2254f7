"""Handles a device that runs out of memory: recognises it, reports it, and undoes the changes of the interrupted
window.

PyTorch has an error of its own for GPUs. On a CPU an allocation that the kernel refuses (memory_limit, or a machine
that does not overcommit) appears as an error of the library that requested it; one that the kernel grants and cannot
keep ends the process without an error.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from drivetrain.errors import OutOfMemory, RunError
from drivetrain.memory.statistics import Statistics

_SAID = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",  # the same on Windows
    "std::bad_alloc",
    "Cannot allocate memory",  # the system, as libraries put it
    "could not create a memory",  # oneDNN, as the next two
    "could not execute a primitive",
    "could not create a primitive(?! descriptor)",  # a descriptor also fails where oneDNN has none
    "out of memory",  # CUDA libraries beside torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)
LESS = (
    "recompute: true, offload_activations: true, 16-bit precision, shorter samples, adapters instead of the whole "
    "model, or an engine that shards"
)


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and names_shortage(str(error))


def names_shortage(message: str) -> bool:
    """Returns whether an error's message is one of those that libraries have where an allocation failed."""
    return re.search("|".join(_SAID), message) is not None


@contextmanager
def room_for(what: str, samples: int = 0, fix: str = f"try {LESS}") -> Iterator[None]:
    """Turns a shortage within the block into OutOfMemory: in a micro-batch of `samples` samples, or (0) in memory that
    no smaller micro-batch saves."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, RunError) or not is_shortage(error):
            raise
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise OutOfMemory(f"out of memory in {what} ({first}): {fix}", samples) from None


class Undo:
    """Undoes a window that did not complete: gradients and BatchNorm's statistics."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, statistics: Statistics) -> None:
        """statistics: the model's, which the caller keeps at the beginning of a window."""
        self._optimizer, self._statistics = optimizer, statistics
        known = {id(buffer) for buffer in statistics.buffers}
        self._others = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in known}
        self._versions: list[int] = []

    def mark(self) -> None:
        """Marks the beginning of a window. Nothing is copied."""
        self._versions = [buffer._version for buffer in self._others.values()]

    def __call__(self) -> None:
        """Undoes the window. Raises RunError where the window changed buffers that were not kept."""
        pairs = zip(self._others.items(), self._versions, strict=True)
        changed = [name for (name, buffer), version in pairs if buffer._version != version]
        if changed:
            why = f"forward changes {', '.join(changed[:4])}, so that a window cannot be tried again in smaller pieces"
            raise RunError(f"out of memory, and {why}: give a smaller micro_batch_size")
        self._statistics.put_back()
        self._optimizer.zero_grad(set_to_none=True)
        give_back()


def give_back() -> None:
    """Returns unused memory to the device, or to the system."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
