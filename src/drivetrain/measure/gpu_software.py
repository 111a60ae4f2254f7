"""Describes the software beneath a run's device, which must be alike on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drivetrain.config.machine import Machine
from drivetrain.measure.nvml import driver_version

# ranks with another of these may hang or compute something else; with another GPU or driver they wait for the slowest
HAVE_TO_MATCH = ("device", "torch", "CUDA", "ROCm", "NCCL")


def device_software(machine: Machine) -> dict[str, str]:
    """Returns kind of device and build of torch; for a GPU its name, driver, CUDA (or ROCm) and NCCL, each if known."""
    found: dict[str, str | None] = {"device": machine.device, "torch": str(torch.__version__)}
    if machine.device == "cuda":
        found |= {
            "GPU": machine.device_name,
            "driver": driver_version(),
            "CUDA": torch.version.cuda,
            "ROCm": torch.version.hip,
            "NCCL": _nccl(),
        }
    return {name: value for name, value in found.items() if value is not None}


def _nccl() -> str | None:
    if not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
