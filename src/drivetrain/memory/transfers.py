"""Copies between the host and a device for which the host does not wait.

A GPU works behind the program. Reading a number from it (`item`, `tolist`, `nonzero`, a boolean index), and a copy from
memory that is not pinned, stops the program until the device has caught up: it then has nothing to do until the program
has queued new work. Numbers that a step needs on the host are therefore read from the tensors that the host sent
(`sent`, `on_host`), and the device's results are fetched while it goes on working (`Later`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

MOST_AHEAD = 2  # batches
# tensor on a device → what it was copied from: a tensor in CPU memory, or an array
_ON_HOST: Any = WeakTensorKeyDictionary()
# storage → the tensor that was sent. Libraries pass on others over the same numbers: DeepSpeed's ZeRO-3 detaches what
# each layer gets.
_SENT: dict[StorageWeakRef, weakref.ref[Tensor]] = {}


def works_behind(device: torch.device) -> bool:
    """Returns whether the device computes while the program goes on, so that reading a number from it stops the
    program."""
    return device.type != "cpu"


def sent(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the tensor on the device, in the dtype if one is passed. tensor: in CPU memory; `on_host` finds it
    again."""
    moved = _moved(tensor, device, dtype)
    remember(moved, tensor)
    return moved


def sent_array(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array on the device. `on_host` finds it again, also in a plan, whose tensors have no numbers."""
    moved = _moved(torch.from_numpy(array), device, None)
    remember(moved, array)
    return moved


def remember(moved: Tensor, own: Tensor | np.ndarray) -> None:
    """Makes `on_host` answer for `moved` with `own`, which has the same numbers and lies in CPU memory."""
    if isinstance(own, np.ndarray) or (moved is not own and moved.dtype == own.dtype):
        _ON_HOST[moved] = own
        storage = StorageWeakRef(moved.untyped_storage())
        _SENT[storage] = weakref.ref(moved, lambda gone: _forget(storage, gone))


def _forget(storage: StorageWeakRef, gone: weakref.ref[Tensor]) -> None:
    if _SENT.get(storage) is gone:  # else another tensor was sent to the same place since
        del _SENT[storage]


def _first_sent(tensor: Tensor) -> Tensor:
    """Returns the tensor that was sent, of which this one may be another view of the same numbers; else itself."""
    if tensor in _ON_HOST:
        return tensor
    known = _SENT.get(StorageWeakRef(tensor.untyped_storage()))
    sent = None if known is None else known()
    same = sent is not None and (sent.shape, sent.stride(), sent.storage_offset(), sent.dtype) == (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype),
    )
    return sent if sent is not None and same else tensor


class Ahead:
    """Copies batches to a GPU before they are needed, on a stream of its own, during the computation of the batch
    before.

    Batches come from pinned memory, as the loader has it; others are copied when they are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._under_way: OrderedDict[int, tuple[Any, dict[str, Tensor]]] = OrderedDict()

    def send(self, batch: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Begins to copy it. dtype: for floating tensors."""
        if id(batch) in self._under_way or not all(tensor.is_pinned() for tensor in batch.values()):
            return
        with torch.cuda.stream(self._stream):
            moved = {
                name: sent(tensor, self._device, dtype if tensor.is_floating_point() else None)
                for name, tensor in batch.items()
            }
        self._under_way[id(batch)] = batch, moved
        while len(self._under_way) > MOST_AHEAD:  # of windows that were never computed: they were cut anew
            self._under_way.popitem(last=False)

    def take(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Returns the copy, for which the device waits before it goes on; None if it was not sent."""
        _, moved = self._under_way.pop(id(batch), (None, None))
        if moved is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_stream(self._stream)
            for tensor in moved.values():
                tensor.record_stream(now)  # its memory is the other stream's, which must not reuse it too early
        return moved


def on_host(tensor: Tensor) -> np.ndarray:
    """Returns the tensor's numbers. Waits for the device only if they were not sent from here: for example, after a dp
    engine has cut them into replicas' parts."""
    own = _ON_HOST.get(_first_sent(tensor), tensor)
    found: np.ndarray = own if isinstance(own, np.ndarray) else own.cpu().numpy()
    return found


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, dtype, non_blocking=True)


class Later:
    """The numbers of a small tensor that is not written to any more, on their way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._arrived = _fetched(tensor)

    def numbers(self) -> Any:
        """Returns the numbers as `tolist` does. Waits until the device has reached the point of the request: one step
        later it has, and still has that step to do."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.tolist()


def _fetched(tensor: Tensor) -> tuple[Tensor, Any]:
    """Returns the numbers in CPU memory, and the event after which they are valid; None if they are valid at once."""
    if tensor.device.type != "cuda":
        return tensor, None
    own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return own, arrived
