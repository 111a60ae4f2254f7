"""Reads what NVIDIA's management library (NVML) knows of one GPU, each figure where the GPU has it.

Parts of a GPU (MIG), virtual GPUs and GPUs that share the CPU's memory (GB10) refuse some questions; a part shares the
power and the processors of the whole, whose figures are then not this run's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Gpu:
    """Utilisation (share of time in which a kernel ran), most memory in use by all processes, energy."""

    def __init__(self, device: torch.device) -> None:
        """Raises any error of NVML where it cannot be used (no driver, no permission, no such device)."""
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._is_part = pynvml, False
        self._refused: set[str] = set()
        self._handle = self._found(str(torch.cuda.get_device_properties(device).uuid))
        self._memory_peak: int | None = None
        self._energy_start = self._millijoules()

    def read(self) -> float | None:
        """Returns the share in use since about a sample ago, 0 to 1; None where it is not known."""
        memory = self._asked("nvmlDeviceGetMemoryInfo", lambda found: int(found.used))
        if memory is not None:
            self._memory_peak = max(self._memory_peak or 0, memory)
        return None if self._is_part else self._asked("nvmlDeviceGetUtilizationRates", lambda found: found.gpu / 100)

    def extra(self) -> dict[str, Any]:
        now = self._millijoules()
        energy = None if now is None or self._energy_start is None else (now - self._energy_start) / 1000
        return {"device_memory_peak_bytes": self._memory_peak, "energy_joules": energy}

    def _found(self, uuid: str) -> Any:
        """Returns NVML's handle of the device with CUDA's UUID, which is a whole GPU's or a part's."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError:
            self._is_part = True
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        try:
            is_divided = self._nvml.nvmlDeviceGetMigMode(handle)[0] == self._nvml.NVML_DEVICE_MIG_ENABLE
        except self._nvml.NVMLError:  # a GPU that cannot be divided
            return handle
        if is_divided:  # CUDA gave the UUID of the whole, whose memory and load are others' too
            self._is_part = True
            self._refused.add("nvmlDeviceGetMemoryInfo")
        return handle

    def _millijoules(self) -> int | None:
        return None if self._is_part else self._asked("nvmlDeviceGetTotalEnergyConsumption", int)

    def _asked(self, question: str, answer: Callable[[Any], Any]) -> Any:
        """Returns NVML's answer; None where it refuses, and the question is not repeated."""
        if question in self._refused:
            return None
        try:
            return answer(getattr(self._nvml, question)(self._handle))
        except self._nvml.NVMLError:
            self._refused.add(question)
            return None


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver; None where NVML cannot be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no package, no driver, no permission: what it raises depends on which
        return None
