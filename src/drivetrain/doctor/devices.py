"""The kinds of devices that PyTorch knows, the abilities of each in a run, and how far each was tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.config.precision import PRECISIONS

NEVER = "never tried"
UNUSED = "nothing yet: a run takes the CPU"


@dataclass(frozen=True)
class Kind:
    """A kind of device. abilities: what a run can do on it. tried: how far this project has shown it."""

    name: str
    abilities: str
    tried: str


def _precisions(device: str, nvidia: bool = False) -> str:
    names = [
        precision.name
        for precision in PRECISIONS.values()
        if device in precision.needs.devices and (nvidia or device == "cpu" or not precision.needs.nvidia_only)
    ]
    return ", ".join(names)


KINDS = {
    "cpu": Kind("CPU", f"{_precisions('cpu')}; all engines, over gloo", "the whole test suite"),
    "cuda": Kind(
        "NVIDIA GPU (CUDA)",
        f"{_precisions('cuda', nvidia=True)}, each from the generation on that has it; all engines, over NCCL",
        "one H200: every precision, single, ddp, fsdp; several GPUs were never tried",
    ),
    "rocm": Kind(
        "AMD GPU (ROCm)", f"{_precisions('cuda')}; all engines, over RCCL; its utilisation is not measured", NEVER
    ),
    "xpu": Kind("Intel GPU (XPU)", UNUSED, NEVER),
    "mps": Kind("Apple GPU (MPS)", UNUSED, NEVER),
}


def present() -> dict[str, str]:
    """Returns the kinds of devices that PyTorch sees here, by their key in KINDS, and the name of the first device of
    each."""
    found = {"cpu": "this machine"}
    if torch.cuda.is_available():
        found["cuda" if torch.version.hip is None else "rocm"] = torch.cuda.get_device_name()
    if torch.xpu.is_available():
        found["xpu"] = torch.xpu.get_device_name()
    if torch.backends.mps.is_available():
        found["mps"] = "Apple"
    return found


def table() -> dict[str, dict[str, Any]]:
    """Returns a row for each kind, JSON-able, with the device here or None."""
    here = present()
    return {
        key: {"name": kind.name, "here": here.get(key), "abilities": kind.abilities, "tried": kind.tried}
        for key, kind in KINDS.items()
    }
