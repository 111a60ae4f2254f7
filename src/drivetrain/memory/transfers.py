"""Copies between the host and a device for which the host does not wait.

A GPU works behind the program. Whatever asks it for a number (`item`, `tolist`, `nonzero`, a boolean index), and a copy
from memory that is not pinned, stops the program until the device has caught up: it then has nothing to do until the
program has queued new work. What a step needs to know on the host it therefore reads from what the host sent (`sent`,
`on_host`), and what the device finds out is fetched while it goes on working (`Later`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MOST_AHEAD = 2  # batches
_ON_HOST: Any = WeakTensorKeyDictionary()  # tensor on a device → the tensor in CPU memory that it was copied from


def works_behind(device: torch.device) -> bool:
    """Whether the device computes while the program goes on, so that asking it for a number stops the program."""
    return device.type != "cpu"


def sent(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on the device, in the dtype if one is given. tensor: in CPU memory; `on_host` finds it again."""
    moved = _moved(tensor, device, dtype)
    remember(moved, tensor)
    return moved


def remember(moved: Tensor, own: Tensor) -> None:
    """Has `on_host` answer for `moved` with `own`, which has the same numbers and lies in CPU memory."""
    if moved is not own and moved.dtype == own.dtype:
        _ON_HOST[moved] = own


class Ahead:
    """Batches on their way to a GPU before they are needed, by a stream of their own: while the one before is computed.

    From pinned memory, as the loader has it; what is not pinned goes when it is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._under_way: OrderedDict[int, tuple[Any, dict[str, Tensor]]] = OrderedDict()

    def send(self, batch: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Begins to copy it. dtype: of floating tensors."""
        if id(batch) in self._under_way or not all(tensor.is_pinned() for tensor in batch.values()):
            return
        with torch.cuda.stream(self._stream):
            moved = {
                name: sent(tensor, self._device, dtype if tensor.is_floating_point() else None)
                for name, tensor in batch.items()
            }
        self._under_way[id(batch)] = batch, moved
        while len(self._under_way) > MOST_AHEAD:  # of windows that nobody took: they were cut anew
            self._under_way.popitem(last=False)

    def take(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Returns the copy, for which the device waits before it goes on; None where it was not sent."""
        _, moved = self._under_way.pop(id(batch), (None, None))
        if moved is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_stream(self._stream)
            for tensor in moved.values():
                tensor.record_stream(now)  # its memory is the other stream's, which must not reuse it too early
        return moved


def on_host(tensor: Tensor) -> np.ndarray:
    """The tensor's numbers. Waits for the device only where they were not sent from here: after a dp engine has cut
    them into replicas' parts, say."""
    found: np.ndarray = _ON_HOST.get(tensor, tensor).cpu().numpy()
    return found


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, dtype, non_blocking=True)


class Later:
    """Numbers of a small tensor, which nothing writes to any more, on their way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._arrived = _fetched(tensor)

    def numbers(self) -> Any:
        """As `tolist` gives them. Waits until the device has reached the point at which they were asked for: one step
        later it has, while it has that step still to do."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.tolist()


def _fetched(tensor: Tensor) -> tuple[Tensor, Any]:
    """The numbers in CPU memory, and the event after which they are there; None: at once."""
    if tensor.device.type != "cuda":
        return tensor, None
    own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return own, arrived
