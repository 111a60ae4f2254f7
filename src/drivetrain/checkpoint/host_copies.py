"""A state on its way to the disk: copied once from the device, into pinned memory that the next save uses again.

A GPU copies to pinned memory by itself, at two to three times the rate of other memory: the program queues the copies
and goes on. They run in the order of the device's work, so an update queued after them cannot change what they read; a
reader of the copies waits for them first. Tensors in CPU memory are copied only if training goes on while they are
written, and that copy is freed afterwards.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.state import State, replaced


class HostCopies:
    def __init__(self) -> None:
        self._buffers: list[Tensor] = []  # of each tensor on the device, in the order of the state
        self._arrived: Any = None  # an event

    def of(self, state: State, apart: bool) -> State:
        """Returns the state in CPU memory, ties kept; valid after `wait`, until the next call.

        apart: whether it must stay unchanged when training changes tensors in CPU memory.
        """
        used = 0

        def copy(tensor: Tensor) -> Tensor:
            nonlocal used
            if not is_away(tensor):
                return tensor.detach().clone() if apart else tensor
            used += 1
            return self._buffer(used - 1, tensor).copy_(tensor.detach(), non_blocking=tensor.is_cuda)

        taken = replaced(state, copy)
        del self._buffers[used:]
        if used and torch.cuda.is_available():
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return taken

    def wait(self) -> None:
        """Waits until the copies are complete."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def _buffer(self, number: int, tensor: Tensor) -> Tensor:
        """Returns a buffer that fits: the last save's, if its tensor in this place was like this one."""
        fits = number < len(self._buffers) and _alike(self._buffers[number], tensor)
        if not fits:
            del self._buffers[number : number + 1]  # before its successor is there
            self._buffers.insert(number, _empty_like(tensor))
        return self._buffers[number]


def is_away(tensor: Tensor) -> bool:
    """Returns whether a tensor is not in CPU memory."""
    return tensor.device.type != "cpu"


def _empty_like(tensor: Tensor) -> Tensor:
    """Allocates in CPU memory, pinned if a GPU is to write to it and the system can pin so much."""
    if tensor.is_cuda:
        with suppress(RuntimeError):
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="cpu")


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
