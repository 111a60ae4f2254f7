"""Measures peak memory, by its right name: allocated and reserved (CUDA), tensor and resident (CPU)."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from drivetrain.measure.observer import Observer, tensors_in

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peaks(device: torch.device) -> None:
    """Starts a new peak. Where the kernel cannot reset it, the resident peak is since the process began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return


def peaks(device: torch.device) -> dict[str, int]:
    """Returns bytes since `reset_peaks`: allocated and reserved by torch on CUDA; resident of the process on a CPU."""
    if device.type == "cuda":
        found = torch.cuda.memory_stats(device)
        return {name: int(found.get(f"{name}_bytes.all.peak", 0)) for name in ("allocated", "reserved")}
    return {"resident": _resident_peak()}


class RecentMemory:
    """The memory in use since the last look, and the largest of all looks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest: dict[str, int] = {}
        self._process = psutil.Process()

    def look(self) -> dict[str, int]:
        """Returns bytes: of a GPU what was allocated and reserved at most since the last call; on a CPU what is
        resident now, since a peak that begins anew would end the run's."""
        if self._device.type != "cuda":
            return {"resident": self._process.memory_info().rss}
        found = peaks(self._device)
        self._largest = joined_peaks(self._largest, found)
        reset_peaks(self._device)
        return found

    def peaks(self) -> dict[str, int]:
        """Returns the peaks of the whole run, as `peaks` would without the looks."""
        return joined_peaks(self._largest, peaks(self._device))


def joined_peaks(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def _resident_peak() -> int:
    # not ru_maxrss: in a child process that can be the parent's
    found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
    return int(found.group(1)) * 1024 if found else psutil.Process().memory_info().rss


class TensorPeak(Observer):
    """Peak bytes of live tensor storages of a kind of device while active, those passed to `track` included.

    Every storage an operator returns counts from its birth until it is freed, so a peak inside one operator (its
    scratch space) is not seen; nor is it before it is resized to nothing, which is how FSDP frees what it gathered. Too
    slow for every step: meant for one.
    """

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__()
        self._kind = kind
        self._live: dict[int, int] = {}  # storage → bytes
        self._one_at_a_time = threading.RLock()  # dp's replicas on a CPU; a storage may be freed within
        self._bytes = 0
        self.phases = [0]  # the peak of each

    @property
    def peak_bytes(self) -> int:
        return max(self.phases)

    def begin_phase(self) -> None:
        """Starts a new peak, from the tensors that live now."""
        with self._one_at_a_time:
            self.phases.append(self._bytes)

    def __enter__(self) -> TensorPeak:
        super().__enter__()
        self._resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = self._resize(storage, size)
            self._resized(storage, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that existed before."""
        for tensor in tensors:
            self._see(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                self._see(tensor.grad)

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        del func, args, kwargs
        for tensor in tensors_in(result):
            self._see(tensor)

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == self._kind  # a fake tensor's, with which DTensor works out shapes, is meta

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type != self._kind or tensor.is_sparse or tensor.is_mkldnn:  # the last has no storage to ask
            return
        storage = tensor.untyped_storage()
        if not self._counts(storage):
            return
        key, size = storage._cdata, storage.nbytes()
        with self._one_at_a_time:
            if key not in self._live:
                weakref.finalize(storage, self._forget, key)
                self._holds(key, size)

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        with self._one_at_a_time:
            if (key := storage._cdata) in self._live:
                self._holds(key, size)

    def _holds(self, key: int, size: int) -> None:
        self._bytes += size - self._live.get(key, 0)
        self._live[key] = size
        self.phases[-1] = max(self.phases[-1], self._bytes)

    def _forget(self, key: int) -> None:
        with self._one_at_a_time:
            self._bytes -= self._live.pop(key, 0)
