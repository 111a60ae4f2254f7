"""The setting of the parts: their device, and the folder of their results."""

from __future__ import annotations

import os
import platform
import re
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PACKAGES = (
    *("torch", "transformers", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-ml-py", "accelerate"),
    *("trl", "peft", "bitsandbytes", "torchao", "flash-attn", "datasets"),
)


@dataclass(frozen=True)
class Setting:
    """device: "cuda" or "cpu". name: of the device, as a file's name. results, scratch: folders; what lies in scratch
    (models, data, runs) may be deleted at any time."""

    device: str
    device_name: str
    results: Path
    scratch: Path

    @property
    def small(self) -> bool:
        """Returns whether the parts run in sizes that a CPU can do, as a rehearsal."""
        return self.device == "cpu"

    @property
    def name(self) -> str:
        return "cpu" if self.small else slug(self.device_name)

    @property
    def folder(self) -> Path:
        return self.results / "gpu" / self.name

    @property
    def logs(self) -> Path:
        """Returns the folder that keeps the output of cases that failed, missed a check or were cut off."""
        return self.scratch / "logs" / self.name

    @property
    def page(self) -> Path:
        return self.results / f"gpu-{self.name}.md"


def slug(name: str) -> str:
    """A device's name in lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def here(device: str, results: Path = RESULTS) -> Setting:
    """SystemExit where there is no such device. Models and runs go to $SCRATCH, or the system's temporary folder."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU here: see `drivetrain doctor`, or rehearse with `make gpu DEVICE=cpu`")
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    scratch = Path(os.environ.get("SCRATCH") or Path(tempfile.gettempdir()) / "drivetrain-gpu")
    return Setting(device, name, results, scratch)


def stamp(setting: Setting) -> dict[str, Any]:
    """Returns what results hold for: date, device, versions."""
    from drivetrain.measure.gpu_software import device_software
    from drivetrain.runtime.hardware import detect

    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": setting.device_name,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "software": device_software(detect(setting.device)),
        "packages": {name: found for name in PACKAGES if (found := installed(name)) is not None},
    }


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
