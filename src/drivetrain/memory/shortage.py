"""What is done when a device's memory runs out: recognised, told, and what a window changed taken back.

PyTorch has an error of its own for GPUs. On a CPU an allocation that the kernel refuses (memory_limit, or a machine
that does not overcommit) becomes whatever the library that asked for it makes of it; one that the kernel grants and
cannot keep ends the process, and no error tells.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from drivetrain.errors import OutOfMemory, RunError
from drivetrain.memory.statistics import Statistics

_SAID = (
    "can't allocate memory",  # torch's allocator on a CPU
    "std::bad_alloc",
    "Cannot allocate memory",  # the system, as libraries put it
    "could not create a memory",  # oneDNN, as the next one; of a primitive's descriptor it says so where it has none
    "could not execute a primitive",
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
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


@contextmanager
def room_for(what: str, samples: int = 0, fix: str = f"try {LESS}") -> Iterator[None]:
    """OutOfMemory for a shortage within: of a micro-batch of `samples` samples, or of what no cut makes smaller (0)."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, RunError) or not is_shortage(error):
            raise
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise OutOfMemory(f"out of memory in {what} ({first}): {fix}", samples) from None


class Undo:
    """Takes back a window that did not come to its end: gradients and BatchNorm's statistics."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, statistics: Statistics) -> None:
        """statistics: the model's, which whoever begins a window keeps."""
        self._optimizer, self._statistics = optimizer, statistics
        known = {id(buffer) for buffer in statistics.buffers}
        self._others = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in known}
        self._versions: list[int] = []

    def mark(self) -> None:
        """Before a window. Nothing is copied."""
        self._versions = [buffer._version for buffer in self._others.values()]

    def __call__(self) -> None:
        """RunError where the window changed buffers that nobody kept."""
        pairs = zip(self._others.items(), self._versions, strict=True)
        changed = [name for (name, buffer), version in pairs if buffer._version != version]
        if changed:
            why = f"forward changes {', '.join(changed[:4])}, so that a window cannot be tried again in smaller pieces"
            raise RunError(f"out of memory, and {why}: give a smaller micro_batch_size")
        self._statistics.put_back()
        self._optimizer.zero_grad(set_to_none=True)
        give_back()


def give_back() -> None:
    """What nobody uses goes back to the device, or to the system."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
